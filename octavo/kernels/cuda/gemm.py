"""The FP8 GEMM on tensor cores, by cuBLASLt through `torch._scaled_mm`; see `octavo.kernels.reference.gemm`.

(`torch.nn.functional.scaled_mm` calls the same product, but costs the host as much again for the recipes of scales that it lists.)

Hopper keeps FP8 sums in about 14 bits and truncates; without `fast_accum` they are promoted to FP32 every few instructions, which
costs 2-4% and is what both backward GEMMs use.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    """See `octavo.kernels.scaled_mm_nt`."""
    if a_codes.numel() == 0:
        # cuBLASLt refuses empty operands; the product over no terms is zero.
        out = a_codes.new_zeros((a_codes.shape[0], b_codes.shape[0]), dtype=out_dtype)
        return out if bias is None else out + bias.to(out_dtype)
    # cuBLASLt adds a bias of the output's dtype, but none to an FP32 output.
    fused_bias = None if bias is None or out_dtype == torch.float32 else bias.to(out_dtype)
    if not inverse_scales:
        a_scale, b_scale = a_scale.reciprocal(), b_scale.reciprocal()
    out = torch._scaled_mm(
        a_codes.contiguous(),
        b_codes.contiguous().t(),
        a_scale,
        b_scale,
        fused_bias,
        None,
        out_dtype,
        fast_accum,
    )
    return out if bias is None or fused_bias is not None else out.add_(bias)
