"""Rotary positions on queries, keys and values as one GEMM writes them.

A rotation in plain PyTorch cuts queries and keys out, widens both to FP32 and writes four products, two sums, a concatenation and a
cast. Here each element is read once and written once, 4 bytes of BF16, and nothing is saved for backward but the table, because the
gradient of a rotation is the rotation by the opposite angle. Over heads of 2·D bytes, H of queries and G of keys and of values:

    rotary             H + 2·G read and written: values are copied along, so that the result is one tensor
    rotary_            H + G: in place, for a caller that owns the tensor and tells autograd of the change; a compiler that functionalizes
                       writes it back into the same memory, if it sees that nobody reads what was there
    rotary_backward    H + 2·G: three gradients become one matrix, with no concatenation before it and no pass for its maximum after it

`rotary_backward_quantize` does not even write that matrix, but its codes: 2 + 2 bytes an element where a hint of the scale is right and
4 + 2 where not, instead of 8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.formats import Format
from octavo.kernels import ops_rotary
from octavo.kernels.dispatch import backend


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, *, backward: bool = False) -> Tensor:
    """Turn channel pairs (i, i + D/2) of the first `heads` heads of `qkv` [B, T, all heads, D] by the angles of a table; copy the others.

    FP32 inside, rounded once to the dtype of `qkv`; the result is contiguous. `octavo.models.layers.rotate` bit for bit.

    Args:
        cos, sin: FP32 [T, D/2], or [B, T, D/2] with angles for each sequence.
        backward: turn by the opposite angle: the gradient of the result to that of `qkv`.

    Raises `ValueError` for an odd D, more heads than there are, or a table of another shape.
    """
    _check(qkv, cos, sin, heads)
    qkv = qkv.detach()
    if is_compiling():
        return ops_rotary.rotary(qkv, cos, sin, heads, backward)
    return backend(qkv).rotary(qkv, cos, sin, heads, backward=backward)


def rotary_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """`rotary` in place, on a contiguous `qkv`: heads that do not turn are not touched.

    Raises `ValueError` as `rotary`, and for a `qkv` that is not contiguous.
    """
    _check(qkv, cos, sin, heads)
    if not qkv.is_contiguous():
        raise ValueError(f"qkv {tuple(qkv.shape)} has strides {qkv.stride()}: what is turned in place is contiguous")
    qkv = qkv.detach()
    if is_compiling():
        ops_rotary.rotary_(qkv, cos, sin, heads)
    else:
        backend(qkv).rotary_(qkv, cos, sin, heads)


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of qkv [B, T, H + 2·G, D], contiguous; its amax, FP32 0-d) from those of turned queries, turned keys and values.

    dq [B, T, H, D], dk and dv [B, T, G, D] of one dtype and any strides; the first two are turned back, each element as by `rotary`,
    unless the table is None, and the last is copied. NaN and infinity reach the amax.

    Raises `ValueError` for shapes or dtypes that do not match, or as `rotary`.
    """
    _check_gradients(dq, dk, dv, cos, sin)
    dq, dk, dv = dq.detach(), dk.detach(), dv.detach()
    if is_compiling():
        return ops_rotary.rotary_backward(dq, dk, dv, cos, sin)
    return backend(dq).rotary_backward(dq, dk, dv, cos, sin)


def rotary_backward_quantize(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    fmt: Format,
    *,
    power_of_two: bool = True,
    row: bool = True,
    col: bool = True,
    column_sum: bool | torch.dtype = False,
    hint: Tensor | None = None,
) -> tuple[Any, ...]:
    """(codes, codes_t, scale, column_sum, inverse) of the gradient of qkv as a matrix [B · T, (H + 2·G) · D], which is not written.

    The results of `octavo.kernels.quantize` of that of `rotary_backward`, rounded to the dtype of dq before: the same bits, but for column
    sums, whose terms may have another order; it is fixed. Arguments are those of both. Raises `ValueError` as `rotary_backward`.
    """
    _check_gradients(dq, dk, dv, cos, sin)
    dq, dk, dv = dq.detach(), dk.detach(), dv.detach()
    dtype = torch.float32 if column_sum is True else column_sum or None
    if is_compiling():
        codes, codes_t, scale, inverse, sums = ops_rotary.rotary_backward_quantize(
            dq, dk, dv, cos, sin, fmt.dtype, power_of_two, row, col, dtype is not None, hint
        )
        return (
            codes if row else None,
            codes_t if col else None,
            scale,
            None if dtype is None else sums.to(dtype),
            inverse,
        )
    options = {"power_of_two": power_of_two, "row": row, "col": col, "column_sum": dtype, "hint": hint}
    codes, codes_t, scale, inverse, sums = backend(dq).rotary_backward_quantize(dq, dk, dv, cos, sin, fmt, **options)
    return codes, codes_t, scale, sums, inverse


def _check_gradients(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    if dk.shape != dv.shape or dq.dim() != 4 or dq.shape[:2] + dq.shape[3:] != dk.shape[:2] + dk.shape[3:]:
        raise ValueError(
            f"dq {tuple(dq.shape)}, dk {tuple(dk.shape)} and dv {tuple(dv.shape)} are to be [B, T, H, D] and twice [B, T, G, D]"
        )
    if not dq.dtype == dk.dtype == dv.dtype:
        raise ValueError(f"dq, dk and dv are {dq.dtype}, {dk.dtype} and {dv.dtype}: one tensor has one dtype")
    if cos is not None and sin is not None:
        _check(dq, cos, sin, dq.shape[2])


def _check(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    batch, tokens, total, channels = qkv.shape
    if channels % 2:
        raise ValueError(f"a head has {channels} channels: rotary positions turn pairs of them")
    if not 0 <= heads <= total:
        raise ValueError(f"heads is {heads}, but qkv {tuple(qkv.shape)} has {total} heads")
    if cos.shape != sin.shape or cos.shape not in ((tokens, channels // 2), (batch, tokens, channels // 2)):
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} are to be [T, D/2] or [B, T, D/2] of qkv {tuple(qkv.shape)}"
        )
