"""What a converted layer does to its parameter object: change how it is stored, and keep its gradient in FP8.

A parameter keeps its identity (`torch.utils.swap_tensors`), so that optimizers, schedulers, tied modules and the user's own
lists go on pointing at the right tensor. Putting a new object into the module instead would leave an optimizer that was built
before with weights that nobody uses, and no error.

The gradient of a ScaledTensor leaves the backward pass in FP8. That of a plain parameter (O1) is turned into FP8 by a hook once
it is accumulated, because AOTAutograd refuses a subclass as gradient of a plain tensor; from the second micro-batch on, autograd
adds to the FP8 gradient in place. The same hook mends a gradient that became plain on its way, as the sum of two uses of a
layer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from octavo.kernels.untraced import untraced
from octavo.linear.operand import scaled_gradient
from octavo.linear.tracing import register_callbacks
from octavo.tensor import ScaledTensor, uncast


def replace_parameter(param: Tensor, value: Tensor, grad: Tensor | None) -> None:
    """Gives `param` the tensor `value`, plain or ScaledTensor, and the gradient `grad`; object, hooks and attributes stay."""
    with user_state_kept(param):
        param.grad = None
        torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=param.requires_grad))
    param.grad = grad


@contextmanager
def user_state_kept(param: Tensor) -> Iterator[None]:
    """The attributes and hooks of `param` are afterwards what they were, although the tensor under it is swapped for another inside.

    (`nn.Module.to` and the like swap a subclass as well, and with it what its user hung on a parameter.)
    """
    attributes = {name: item for name, item in param.__dict__.items() if name not in _OWN_ATTRIBUTES}
    hooks, post_hooks = param._backward_hooks, param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    yield
    param.__dict__.update(attributes)
    param._backward_hooks, param._post_accumulate_grad_hooks = hooks, post_hooks  # type: ignore[attr-defined]


_OWN_ATTRIBUTES = {"_is_param", "_octavo_cast", "_octavo_accumulates", *ScaledTensor.__annotations__}
"""Attributes that belong to the tensor under a parameter, not to its user."""


def replaceable(param: Tensor) -> bool:
    """Whether `replace_parameter` can work: nothing but Python variables may refer to the tensor.

    Views, saved tensors of a backward pass that was not run and weak references do.
    """
    stand_in = nn.Parameter(torch.empty(0, dtype=param.dtype, device=param.device))
    try:
        torch.utils.swap_tensors(param, stand_in)
    except RuntimeError:
        return False
    torch.utils.swap_tensors(param, stand_in)
    return True


@untraced
def store_gradient(param: Tensor) -> None:
    """Hook after accumulation: turns a plain `param.grad` into an E4M3 ScaledTensor."""
    register_callbacks()
    grad = param.grad
    if grad is not None and not isinstance(grad, ScaledTensor):
        with torch.no_grad():
            param.grad = scaled_gradient(grad, param.dtype, param.__dict__.get("_octavo_stats"))


def is_watched(param: Tensor) -> bool:
    """Whether `watch_gradient` has nothing to do for a leaf."""
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return hooks is not None and store_gradient in hooks.values()


def watch_gradient(param: Tensor) -> None:
    """Registers `store_gradient` on `param`, once. A frozen parameter is watched too: it may be unfrozen at any time.

    A weight computed from parameters (pruning, weight norm) keeps no gradient of its own, and is left alone.
    """
    if param.is_leaf and not is_watched(param):
        requires_grad = param.requires_grad
        param.requires_grad_(True).register_post_accumulate_grad_hook(store_gradient)
        param.requires_grad_(requires_grad)


def unwatch_gradient(param: Tensor) -> None:
    """Removes the hook; a gradient in FP8 becomes plain."""
    hooks = param._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
    for key in [key for key, hook in hooks.items() if hook is store_gradient]:
        del hooks[key]
    if param.grad is not None:
        param.grad = uncast(param.grad)
