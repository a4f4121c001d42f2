"""The product of two FP8 matrices, by the tensor cores (see `octavo.kernels`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.kernels import ops
from octavo.kernels.dispatch import backend


def scaled_mm_nt(
    a_codes: Tensor,
    b_codes: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    bias: Tensor | None = None,
    inverse_scales: bool = False,
) -> Tensor:
    """(a_codes [M, K] · b_codes [N, K]ᵀ) / (a_scale · b_scale) + bias [N], as [M, N] of `out_dtype`.

    Both operands are FP8 and row-major, K and N multiples of 16 (on CUDA); not both E5M2. Scales are FP32, 0-d, or with
    `inverse_scales` their reciprocals, which the tensor cores multiply by: it saves computing them for each product.
    `fast_accum` lets Hopper keep sums in about 14 bits: good enough for the forward GEMM only.
    Raises `ValueError` where the shapes do not match, or for two E5M2 operands.
    """
    if a_codes.shape[-1] != b_codes.shape[-1]:
        raise ValueError(
            f"a_codes {tuple(a_codes.shape)} and b_codes {tuple(b_codes.shape)} differ in K, their last dim"
        )
    if a_codes.dtype == b_codes.dtype == torch.float8_e5m2:
        raise ValueError("a_codes and b_codes are both E5M2, which no tensor core multiplies: cast one of them to E4M3")
    if is_compiling():
        return ops.scaled_mm_nt(a_codes, b_codes, a_scale, b_scale, out_dtype, fast_accum, bias, inverse_scales)
    return backend(a_codes).scaled_mm_nt(
        a_codes, b_codes, a_scale, b_scale, out_dtype, fast_accum=fast_accum, bias=bias, inverse_scales=inverse_scales
    )
