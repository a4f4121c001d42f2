"""Accumulation of FP8 gradients: the gradient of a micro-batch joins the sum of those before it, without leaving eight bits.

The sum is E4M11 (see `octavo.kernels.reference.residual`), and each addition gives it a fresh scale. Done apart, both sides become FP32,
their sum is read for its maximum, cast to new codes and copied: 38 bytes an element, and new memory of 10. In place it is 3 bytes for
the maximum and 3 + 2 for the sum: codes, residual and addend are read twice because an FP32 sum that waits would cost more, 4 + 4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.kernels import ops_accumulate
from octavo.kernels.dispatch import backend


def accumulate(codes: Tensor, residual: Tensor | None, scale: Tensor, other: Tensor, other_scale: Tensor) -> Tensor:
    """Add other / other_scale to the E4M11 sum (codes, residual) / scale, in place, with a fresh scale; the residual, new if it was None.

    FP32 inside: `uncast_residual` (`uncast` where there is no residual yet) plus `uncast` of `other`, then `cast_residual` with the
    power of two that `scale_from_amax` gives, bit for bit. If any sum is not finite, all codes become NaN and the scale 1.

    Args:
        codes, other: E4M3 of one shape, contiguous; they share no memory.
        residual: int8 of that shape, contiguous, or None.
        scale, other_scale: FP32, 0-d.

    Raises `ValueError` for tensors that are not this.
    """
    for name, tensor, dtype in (
        ("codes", codes, torch.float8_e4m3fn),
        ("other", other, torch.float8_e4m3fn),
        ("residual", residual, torch.int8),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.shape != codes.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}: accumulation takes contiguous {dtype} "
                f"{tuple(codes.shape)}"
            )
    for name, tensor in (("scale", scale), ("other_scale", other_scale)):
        if tensor.dtype != torch.float32 or tensor.dim():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: accumulation takes one FP32 number, 0-d")
    first = residual is None
    if residual is None:
        residual = torch.empty_like(codes, dtype=torch.int8)
    run = ops_accumulate.accumulate if is_compiling() else backend(codes).accumulate
    run(codes, residual, scale, other, other_scale, first)
    return residual
