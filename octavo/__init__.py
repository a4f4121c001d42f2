"""octavo: full-stack FP8 training for PyTorch."""
