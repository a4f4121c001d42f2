"""Activation functions as the producers of FP8 operands, forward and backward: see `octavo.kernels.reference.activation`.

`kind` is "gelu", the tanh form, of h [M, F], or "swiglu", silu(gate) · up, of h [M, 2·F] with all gates first. a and da are [M, F].
With current scaling, `activation_quantize` finds the scale; with delayed scaling `..._cast` is all that runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.formats import Format
from octavo.kernels import ops_activation as ops
from octavo.kernels.dispatch import backend
from octavo.kernels.reference.activation import GATED


def activation_amax(h: Tensor, kind: str) -> Tensor:
    """max |a| of a = act(h), rounded to the dtype of h; FP32, 0-d. NaN and infinity propagate; an empty `h` gives 0.

    Raises `ValueError` for an unknown `kind` or an `h` that is no matrix of it.
    """
    _check(h, kind)
    h = h.detach()
    return ops.activation_amax(h, kind) if is_compiling() else backend(h).activation_amax(h, kind)


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
    """(codes [Mp, Fp], codes_t [Fp, Mp], amax) of a = act(h), rounded to the dtype of h, in one pass over h.

    The codes are those of `cast_transpose(a, scale, dtype, ...)`, with zero codes in the padding; what is not wanted is None.
    `scale` is FP32, 0-d; `stats` as in `cast`. Raises `ValueError` as `activation_amax`, and for another shape of `scale`.
    """
    _check(h, kind, scale=scale)
    h = h.detach()
    if is_compiling():
        codes, codes_t, maximum, counts = ops.activation_cast(h, kind, scale, dtype, row, col, amax, stats is not None)
        if stats is not None:
            stats += counts
        return codes if row else None, codes_t if col else None, maximum if amax else None
    return backend(h).activation_cast(h, kind, scale, dtype, row=row, col=col, amax=amax, stats=stats)


def activation_backward_amax(da: Tensor, h: Tensor, kind: str) -> Tensor:
    """max |dh| of the gradient for h, rounded to the dtype of h; FP32, 0-d. `da` is that of a = act(h).

    Raises `ValueError` as `activation_amax`, and where `da` does not fit.
    """
    _check(h, kind, da)
    da, h = da.detach(), h.detach()
    if is_compiling():
        return ops.activation_backward_amax(da, h, kind)
    return backend(h).activation_backward_amax(da, h, kind)


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
    """(codes, codes_t, amax, column_sum) of the gradient dh for h, rounded to the dtype of h, in one pass over da and h.

    `column_sum`, if `bias_sum` asks for it, is that of dh before the cast, FP32 [F or 2·F]: the gradient of the bias that went into h. It
    is the same in every run. All else is as in `activation_cast`.
    """
    _check(h, kind, da, scale)
    da, h = da.detach(), h.detach()
    if is_compiling():
        codes, codes_t, maximum, column_sum, counts = ops.activation_backward_cast(
            da, h, kind, scale, dtype, row, col, bias_sum, amax, stats is not None
        )
        if stats is not None:
            stats += counts
        operands = codes if row else None, codes_t if col else None
        return *operands, maximum if amax else None, column_sum if bias_sum else None
    return backend(h).activation_backward_cast(
        da, h, kind, scale, dtype, row=row, col=col, bias_sum=bias_sum, amax=amax, stats=stats
    )


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
    """(codes, codes_t, scale, visible, inverse, column_sum) of a = act(h) or, given da, of dh, with the scale of its own largest value.

    `scale` is the one of the cast, `visible` and `inverse` are what `octavo.kernels.visible_scale` makes of it; all else is as in
    `activation_cast` and `activation_backward_cast`. `hint` is as in `octavo.kernels.quantize`: where it is right, h and da are read once.
    """
    _check(h, kind, da)
    h, da = h.detach(), None if da is None else da.detach()
    if is_compiling():
        codes, codes_t, *scales, column_sum = ops.activation_quantize(
            h, kind, fmt.dtype, da, row, col, bias_sum, power_of_two, hint
        )
        return codes if row else None, codes_t if col else None, *scales, column_sum if bias_sum else None
    return backend(h).activation_quantize(
        h, kind, fmt, da=da, row=row, col=col, bias_sum=bias_sum, power_of_two=power_of_two, hint=hint
    )


def _check(h: Tensor, kind: str, da: Tensor | None = None, scale: Tensor | None = None) -> None:
    if kind not in GATED:
        raise ValueError(f"kind is {kind!r}: use one of {', '.join(map(repr, GATED))}")
    if h.dim() != 2:
        raise ValueError(f"h has shape {tuple(h.shape)}: flatten it to [tokens, features]")
    if GATED[kind] and h.shape[1] % 2:
        raise ValueError(
            f"h {tuple(h.shape)} of {kind!r} holds gates and as many values beside them: its width is even"
        )
    wanted = (h.shape[0], h.shape[1] // 2 if GATED[kind] else h.shape[1])
    if da is not None and da.shape != wanted:
        raise ValueError(f"da of {kind!r} with h {tuple(h.shape)} has shape {wanted}, not {tuple(da.shape)}")
    if scale is not None and scale.dim() != 0:
        raise ValueError(f"the scale is 0-d, not of shape {tuple(scale.shape)}")
