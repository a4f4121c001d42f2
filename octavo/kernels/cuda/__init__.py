"""The kernels for CUDA: Triton for everything element-wise, cuBLASLt for the GEMM. CUDA builds of PyTorch bring Triton.

The same names and arguments as `octavo.kernels.reference`, and the same bits, but for the GEMM.
"""

from octavo.kernels.cuda.adamw import adamw
from octavo.kernels.cuda.cast import amax, cast, scale_from_amax, uncast
from octavo.kernels.cuda.gemm import scaled_mm_nt
from octavo.kernels.cuda.magnitudes import magnitudes
from octavo.kernels.cuda.residual import cast_residual, uncast_residual
from octavo.kernels.cuda.transpose import cast_transpose, cast_transpose_amax, transpose_codes

__all__ = [
    "adamw",
    "amax",
    "cast",
    "cast_residual",
    "cast_transpose",
    "cast_transpose_amax",
    "magnitudes",
    "scale_from_amax",
    "scaled_mm_nt",
    "transpose_codes",
    "uncast",
    "uncast_residual",
]
