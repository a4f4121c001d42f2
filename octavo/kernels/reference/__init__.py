"""The specification of every kernel: the same name and arguments in plain PyTorch, on any device."""

from octavo.kernels.reference.accumulate import accumulate
from octavo.kernels.reference.activation import (
    activation_amax,
    activation_backward_amax,
    activation_backward_cast,
    activation_cast,
    activation_quantize,
)
from octavo.kernels.reference.adamw import adamw
from octavo.kernels.reference.adamw_scalars import adamw_scalars
from octavo.kernels.reference.adamw_step import adamw_commit, adamw_prepare
from octavo.kernels.reference.cast import (
    ALIGN,
    amax,
    cast,
    cast_transpose,
    cast_transpose_amax,
    pad_codes,
    scale_from_amax,
    transpose_codes,
    uncast,
)
from octavo.kernels.reference.cross_entropy import softmax_gradient
from octavo.kernels.reference.gemm import scaled_mm_nt
from octavo.kernels.reference.magnitudes import magnitudes
from octavo.kernels.reference.norm import add_norm_stats, norm_backward, norm_cast, norm_stats
from octavo.kernels.reference.quantize import cast_current, current_scale, quantize, row_sums, visible_scale
from octavo.kernels.reference.random import make_key, random_bits
from octavo.kernels.reference.reduce import cast_sum, local_scales, pack_codes, sum_codes, unpack_codes
from octavo.kernels.reference.reduce_scalars import update_mu
from octavo.kernels.reference.residual import cast_residual, merge_e4m11, split_e4m11, uncast_residual
from octavo.kernels.reference.rotary import rotary, rotary_, rotary_backward, rotary_backward_quantize
from octavo.kernels.reference.windows import update_windows

__all__ = [
    "ALIGN",
    "accumulate",
    "activation_amax",
    "activation_backward_amax",
    "activation_backward_cast",
    "activation_cast",
    "activation_quantize",
    "add_norm_stats",
    "adamw",
    "adamw_commit",
    "adamw_prepare",
    "adamw_scalars",
    "amax",
    "cast",
    "cast_current",
    "cast_residual",
    "cast_sum",
    "cast_transpose",
    "cast_transpose_amax",
    "current_scale",
    "local_scales",
    "magnitudes",
    "make_key",
    "merge_e4m11",
    "norm_backward",
    "norm_cast",
    "norm_stats",
    "pack_codes",
    "pad_codes",
    "quantize",
    "random_bits",
    "rotary",
    "rotary_",
    "rotary_backward",
    "rotary_backward_quantize",
    "row_sums",
    "scale_from_amax",
    "scaled_mm_nt",
    "softmax_gradient",
    "split_e4m11",
    "sum_codes",
    "transpose_codes",
    "uncast",
    "uncast_residual",
    "unpack_codes",
    "update_mu",
    "update_windows",
    "visible_scale",
]
