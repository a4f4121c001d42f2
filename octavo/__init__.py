"""octavo: full-stack FP8 training for PyTorch."""

__version__ = "0.1.0"
