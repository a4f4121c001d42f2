"""Rotary positions on queries, keys and values as one GEMM writes them.

A rotation in plain PyTorch cuts queries and keys out, widens both to FP32 and writes four products, two sums, a concatenation and a
cast. Here each element is read once and written once: 4 bytes of BF16. Nothing is saved for backward but the table, because the
gradient of a rotation is the rotation by the opposite angle. Values are copied along (2 of 6 bytes in three, without groups) so that
the result is one tensor; turning in place would save that, but autograd would then have to be told of the change.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

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
    batch, tokens, total, channels = qkv.shape
    if channels % 2:
        raise ValueError(f"a head has {channels} channels: rotary positions turn pairs of them")
    if not 0 <= heads <= total:
        raise ValueError(f"heads is {heads}, but qkv {tuple(qkv.shape)} has {total} heads")
    if cos.shape != sin.shape or cos.shape not in ((tokens, channels // 2), (batch, tokens, channels // 2)):
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} are to be [T, D/2] or [B, T, D/2] of qkv {tuple(qkv.shape)}"
        )
    qkv = qkv.detach()
    if is_compiling():
        return ops_rotary.rotary(qkv, cos, sin, heads, backward)
    return backend(qkv).rotary(qkv, cos, sin, heads, backward=backward)
