"""Transposed copies of FP8 matrices, which the tensor cores want where a GEMM contracts over rows (see `octavo.kernels`)."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from octavo.kernels import ops
from octavo.kernels.dispatch import backend


def transpose_codes(codes: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Transposed copy [Kp, Mp] of 1-byte `codes` [M, K], padded with zero codes to multiples of 16.

    `out` is written instead of a new tensor: [Kp, Mp] of the dtype of `codes`, its rows contiguous and apart by any stride, so that
    it may be some columns of a larger matrix. Raises `ValueError` if it is not that.
    """
    if out is not None:
        wanted = (ops.padded(codes.shape[1]), ops.padded(codes.shape[0]))
        if out.shape != wanted or out.dtype != codes.dtype or out.stride(1) != 1:
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}, but the transposed codes are {codes.dtype} "
                f"{wanted} in contiguous rows"
            )
    if not is_compiling():
        return backend(codes).transpose_codes(codes, out=out)
    codes_t = ops.transpose_codes(codes)
    return codes_t if out is None else out.copy_(codes_t)
