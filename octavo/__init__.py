"""octavo: FP8 training for PyTorch — GEMMs, saved activations, gradients and optimizer state in eight bits.

    model, optimizer = octavo.initialize(model, optimizer, recipe="O2")

Importing it patches nothing, needs no GPU and loads neither Triton nor any optional library. The trainer (`octavo.train`), the
models (`octavo.models`) and the data (`octavo.data`) are imported by name.
"""

__version__ = "0.1.0"  # first: octavo's own modules may read it

from octavo.convert import BreakEven, convert, convert_report, export, initialize
from octavo.distributed import DataParallel
from octavo.formats import BF16, E4M3, E5M2, FP16, FP32, Format, NumericsError
from octavo.linear import FP8Linear
from octavo.memory import memory_report
from octavo.optim import Adam, AdamW, clip_grad_norm_, release_gradients
from octavo.recipe import RECIPES, Recipe
from octavo.tensor import ScaledTensor, cast, uncast

__all__ = [
    # a model and its optimizer
    "initialize",
    "convert",
    "convert_report",
    "BreakEven",
    "export",
    "FP8Linear",
    "AdamW",
    "Adam",
    "clip_grad_norm_",
    "release_gradients",
    "memory_report",
    "DataParallel",
    # precision as data
    "Recipe",
    "RECIPES",
    "Format",
    "E4M3",
    "E5M2",
    "FP16",
    "BF16",
    "FP32",
    # tensors
    "ScaledTensor",
    "cast",
    "uncast",
    "NumericsError",
]
