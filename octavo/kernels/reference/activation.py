"""GELU and SwiGLU before their cast, and their gradients: the specification of the fused kernels.

    gelu      a = x · σ(2·u)          u = √(2/π)·(x + 0.044715·x³)          h [M, F] holds x
    swiglu    a = g · σ(g) · p                                              h [M, 2·F] holds the gates g, then p

½·(1 + tanh u) is σ(2·u): the same function as `F.gelu(approximate="tanh")`, but without a sum that cancels where x is negative. With
s the value of σ, the gradients are

    gelu      dx = da · (s + x·(s − s²)·2·u′)        2·u′ = 2·√(2/π)·(1 + 3·0.044715·x²)
    swiglu    dg = da · p · (s + g·s·(1 − s))        dp = da · g · s

Everything is FP32 inside, and rounded once, to the dtype of h, before it is measured, summed or cast: so a fused kernel has the codes
that the separate steps have. (SwiGLU written with two operators in BF16 rounds g·σ(g) too; compiled, it does not.)
Values that are not finite are those of PyTorch: GELU and SiLU of −∞ are NaN, as are all gradients at ±∞.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.reference.cast import amax as largest
from octavo.kernels.reference.cast import cast_transpose
from octavo.kernels.reference.quantize import current_scale

SLOPE = 2 * math.sqrt(2 / math.pi)
"""2·u / x at x = 0."""
CUBIC = 0.044715
"""The weight of x³ in u."""
GATED = {"gelu": False, "swiglu": True}
"""Whether h of a kind of activation holds gates and what they gate."""


def activation_amax(h: Tensor, kind: str) -> Tensor:
    """max |a|, FP32, 0-d, of a = act(h) in the dtype of h; see `octavo.kernels.activation_amax`."""
    return largest(activate(h, kind))


def activation_cast(
    h: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool = True,
    col: bool = True,
    amax: bool = True,
    stats: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(codes, codes_t, amax) of a = act(h) in the dtype of h; see `octavo.kernels.activation_cast`."""
    a = activate(h, kind)
    return *cast_transpose(a, scale, dtype, row=row, col=col, stats=stats), largest(a) if amax else None


def activation_backward_amax(da: Tensor, h: Tensor, kind: str) -> Tensor:
    """max |dh|, FP32, 0-d, of the gradient in the dtype of h; see `octavo.kernels.activation_backward_amax`."""
    return largest(activate_backward(da, h, kind))


def activation_backward_cast(
    da: Tensor,
    h: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool = True,
    col: bool = True,
    bias_sum: bool = False,
    amax: bool = True,
    stats: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(codes, codes_t, amax, column sums FP32) of the gradient in the dtype of h; see `octavo.kernels.activation_backward_cast`."""
    dh = activate_backward(da, h, kind)
    column_sum = dh.sum(0, dtype=torch.float32) if bias_sum else None
    codes = cast_transpose(dh, scale, dtype, row=row, col=col, stats=stats)
    return *codes, largest(dh) if amax else None, column_sum


def activation_quantize(
    h: Tensor,
    kind: str,
    fmt: Format,
    *,
    da: Tensor | None = None,
    row: bool = True,
    col: bool = True,
    bias_sum: bool = False,
    power_of_two: bool = True,
    hint: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    """(codes, codes_t, scale, visible, inverse, column sums) of a = act(h) or, given da, of dh, with the scale of its own amax.

    See `octavo.kernels.activation_quantize`. No result depends on `hint`.
    """
    y = activate(h, kind) if da is None else activate_backward(da, h, kind)
    scale, visible, inverse = current_scale(largest(y), fmt.max, power_of_two)
    column_sum = y.sum(0, dtype=torch.float32) if bias_sum else None
    return *cast_transpose(y, scale, fmt.dtype, row=row, col=col), scale, visible, inverse, column_sum


def activate(h: Tensor, kind: str) -> Tensor:
    """a [M, F] in the dtype of h."""
    if GATED[kind]:
        gate, up = h.float().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(h.dtype)
    x = h.float()
    return (x * torch.sigmoid(_twice_u(x))).to(h.dtype)


def activate_backward(da: Tensor, h: Tensor, kind: str) -> Tensor:
    """dh in the shape and dtype of h, for the gradient da [M, F] of a."""
    grad = da.float()
    if GATED[kind]:
        gate, up = h.float().chunk(2, dim=-1)
        s = torch.sigmoid(gate)
        silu = gate * s
        return torch.cat([grad * up * (s + silu * (1 - s)), grad * silu], dim=-1).to(h.dtype)
    x = h.float()
    s = torch.sigmoid(_twice_u(x))
    return (grad * (s + x * (s - s * s) * (SLOPE + 3 * SLOPE * CUBIC * (x * x)))).to(h.dtype)


def _twice_u(x: Tensor) -> Tensor:
    return x * (SLOPE + SLOPE * CUBIC * (x * x))
