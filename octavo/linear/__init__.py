"""Linear layers in FP8: `operand` casts, `gemm` multiplies, `storage` keeps weights, `module` is the layer, `head` that of
logits, `stats` counts losses."""

from octavo.linear.gemm import LinearFunction
from octavo.linear.head import HeadLinear
from octavo.linear.module import FP8Conv1D, FP8Linear
from octavo.linear.operand import Operand, cast_operand, drop_weight_cache, scaled_gradient, weight_operand
from octavo.linear.stats import CastCounts, collect_stats
from octavo.linear.storage import replace_parameter, replaceable

__all__ = [
    "CastCounts",
    "FP8Conv1D",
    "FP8Linear",
    "HeadLinear",
    "LinearFunction",
    "Operand",
    "cast_operand",
    "collect_stats",
    "drop_weight_cache",
    "replace_parameter",
    "replaceable",
    "scaled_gradient",
    "weight_operand",
]
