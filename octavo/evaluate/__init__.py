"""Zero-shot tasks, perplexity and held-out loss of a model, and comparisons of two.

`octavo eval` does all of it. From Python: `load_model` reads a run of octavo or a Hugging Face folder, `evaluate` runs an
`EvalConfig`, `Results.read` and `compare` work on what it wrote. `octavo.evaluate.harness.HarnessLM` puts a loaded model into
lm-evaluation-harness for any other of its tasks; it is imported by name, since the harness takes seconds to import.
"""

from octavo.evaluate.compare import Comparison, Difference, compare
from octavo.evaluate.entry import EvalConfig, compare_all, evaluate
from octavo.evaluate.models import LoadedModel, load_model
from octavo.evaluate.results import Measurement, Results

__all__ = [
    "Comparison",
    "Difference",
    "EvalConfig",
    "LoadedModel",
    "Measurement",
    "Results",
    "compare",
    "compare_all",
    "evaluate",
    "load_model",
]
