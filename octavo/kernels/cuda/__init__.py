"""The kernels for CUDA: Triton for everything element-wise, cuBLASLt for the GEMM. CUDA builds of PyTorch bring Triton.

The same names and arguments as `octavo.kernels.reference`, and the same bits, but for the GEMM.
"""

from octavo.kernels.cuda.accumulate import accumulate
from octavo.kernels.cuda.activation import (
    activation_amax,
    activation_backward_amax,
    activation_backward_cast,
    activation_cast,
    activation_quantize,
)
from octavo.kernels.cuda.adamw import adamw
from octavo.kernels.cuda.adamw_step import adamw_commit, adamw_prepare
from octavo.kernels.cuda.cast import amax, cast, scale_from_amax, uncast
from octavo.kernels.cuda.cross_entropy import softmax_gradient
from octavo.kernels.cuda.gemm import scaled_mm_nt
from octavo.kernels.cuda.magnitudes import magnitudes
from octavo.kernels.cuda.norm import add_norm_stats, norm_cast, norm_stats
from octavo.kernels.cuda.norm_backward import norm_backward
from octavo.kernels.cuda.quantize import cast_current, quantize
from octavo.kernels.cuda.reduce import cast_sum, local_scales, pack_codes, sum_codes, unpack_codes, update_mu
from octavo.kernels.cuda.residual import cast_residual, uncast_residual
from octavo.kernels.cuda.rotary import rotary, rotary_, rotary_backward
from octavo.kernels.cuda.rotary_casts import rotary_backward_quantize
from octavo.kernels.cuda.row_sums import row_sums
from octavo.kernels.cuda.scales import current_scale, visible_scale
from octavo.kernels.cuda.transpose import cast_transpose, cast_transpose_amax, transpose_codes
from octavo.kernels.cuda.windows import update_windows

__all__ = [
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
    "norm_backward",
    "norm_cast",
    "norm_stats",
    "pack_codes",
    "quantize",
    "rotary",
    "rotary_",
    "rotary_backward",
    "rotary_backward_quantize",
    "row_sums",
    "scale_from_amax",
    "scaled_mm_nt",
    "softmax_gradient",
    "sum_codes",
    "transpose_codes",
    "uncast",
    "uncast_residual",
    "unpack_codes",
    "update_mu",
    "update_windows",
    "visible_scale",
]
