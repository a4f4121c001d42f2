"""The FP8 GEMM: (A · Bᵀ) / (a_scale · b_scale), both operands row-major along the contracted dim (K-major), as Hopper reads them.

A product of two FP8 values has at most 4 + 4 significant bits, so it is exact in FP32, and the operands are exact in BF16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.cast import uncast


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

    With `inverse_scales`, scales are given as their reciprocals. `fast_accum` has no effect here: sums are kept in FP32. A BF16 result is
    computed from BF16 operands, which CPUs have matrix units for, and rounded once before the scale; any other from FP32 operands.
    """
    compute = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    one = torch.ones((), dtype=torch.float32, device=a_codes.device)
    with torch.autocast(a_codes.device.type, enabled=False):  # autocast of the caller would round FP32 operands
        out = uncast(a_codes, one, compute) @ uncast(b_codes, one, compute).t()
    # Two reciprocals: the product of the scales may leave the range of FP32. In FP32, since a 0-d factor would be rounded to BF16.
    if not inverse_scales:
        a_scale, b_scale = a_scale.reciprocal(), b_scale.reciprocal()
    out = (out.float() if compute != torch.float32 else out).mul_(a_scale * b_scale)
    return (out if bias is None else out.add_(bias)).to(out_dtype)
