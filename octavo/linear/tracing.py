"""Keeps FP8 gradients out of the sight of `torch.compile` while it traces.

To trace, Dynamo makes a fake copy of each parameter and of its `.grad`, and describes both with one record. That fails with an
AssertionError if they are stored differently: a plain parameter with an FP8 gradient (O1), or one whose gradient has a residual (any
level, from the second micro-batch on). A function that is compiled again between two micro-batches, say for a new sequence
length, would stop there. So gradients step aside from the start of a compilation to its end; no traced code of a layer reads
them. This registers two callbacks with Dynamo, when the first gradient is stored in FP8.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from octavo.tensor import ScaledTensor

layers: WeakSet[nn.Module] = WeakSet()
"""All layers whose weights may have FP8 gradients. (Weak references to the parameters would forbid to swap them.)"""
_aside: list[tuple[Tensor, Tensor]] = []


def register_callbacks() -> None:
    """Has Dynamo call us around each compilation; again after `torch._dynamo.reset()`, which forgets callbacks."""
    from torch._dynamo import callback_handler

    if _hide not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_hide)
        callback_handler.register_end_callback(_restore)


def _hide(_: Any = None) -> None:
    for layer in layers:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if weight.is_leaf and isinstance(weight.grad, ScaledTensor):
            _aside.append((weight, weight.grad))
            weight.grad = None


def _restore(_: Any = None) -> None:
    while _aside:
        weight, grad = _aside.pop()
        weight.grad = grad
