"""What operations do to ScaledTensors; called below autograd, in place of each operator that has one among its arguments.

Few operators are known by name (`octavo.tensor.operators`). The schema of the others says what they are: those that only need shapes
(zeros_like) give plain tensors, views run on the codes, and all else computes on real values and re-quantises the arguments that it
wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from octavo.tensor.operators import HANDLERS, Arguments, Keywords, aten, increment_versions
from octavo.tensor.scaled_tensor import ScaledTensor


def dispatch(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """The result of operator `func`, from the first handler that does not return NotImplemented.

    Raises `NotImplementedError` for a change of shape in place.
    """
    for handler in (HANDLERS.get(func), _factory, _view, _decompose):
        if handler is not None:
            out = handler(func, args, kwargs)
            if out is not NotImplemented:
                return out
    return _compute(func, args, kwargs)


def _factory(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """zeros_like, new_full and so on need shape, dtype and device. The result is plain: an optimizer state that starts as
    `zeros_like(p)` should not inherit few bits."""
    if not _is_factory(func):
        return NotImplemented
    x = args[0]
    kwargs = {**kwargs, "device": kwargs.get("device") or x.device}
    return func(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *args[1:], **kwargs)


def _view(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A view of the codes, which knows how to find its part in the whole."""
    if not _is_view(func):
        return NotImplemented
    x = args[0]
    same = func in (aten.detach.default, aten.alias.default)

    def wrap(codes: Tensor, pick: Callable[[Any], Tensor]) -> ScaledTensor:
        path = x._path if same else (*x._path, lambda whole: pick(func(whole, *args[1:], **kwargs)))
        return ScaledTensor._wrap(x._storage, codes, path, x.dtype, x.residual_on_add)

    # `detach` keeps the very tensor of codes, and so its version: a parameter is made by it.
    out = x.codes if same else func(x.codes, *args[1:], **kwargs)
    if isinstance(out, Tensor):
        out = wrap(out, lambda result: result)
    else:
        out = [wrap(codes, itemgetter(i)) for i, codes in enumerate(out)]
    return return_and_correct_aliasing(func, args, kwargs, out)


def _decompose(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Composite operators arrive whole in inference mode; their parts may be views."""
    return func.decompose(*args, **kwargs)


def _compute(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Computes on real values, and re-quantises what was written."""
    written = _written(func, args, kwargs)
    # A 16-bit logical dtype would lose an increment before the codes can round it.
    in_fp32 = _accumulates(func) and all(
        isinstance(x, ScaledTensor) and x.dtype.itemsize == 2 for x in tree_leaves(args[0])
    )

    def dtype(x: Tensor) -> torch.dtype:
        return torch.float32 if in_fp32 and x.is_floating_point() else x.dtype

    wholes = {id(x._storage): (x._storage, x._storage.real(dtype(x))) for x in written}
    reals: dict[int, Tensor] = {}

    def unwrap(x: Any) -> Any:
        if not isinstance(x, ScaledTensor):
            return x.to(dtype(x)) if isinstance(x, Tensor) else x
        if id(x) not in reals:  # an argument that is given twice is one tensor
            whole = wholes.get(id(x._storage))
            reals[id(x)] = x.dequantize(dtype(x)) if whole is None else x._replay(whole[1])
        return reals[id(x)]

    out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    for x in written:
        if reals[id(x)].shape != x.shape:
            raise NotImplementedError(
                f"{func} changes the shape of a ScaledTensor in place: use the form without underscore"
            )
    for storage, real in wholes.values():
        storage.requantise(real, residual=storage.residual is not None, stochastic=_accumulates(func))
    direct = [id(argument) for argument in (*args, *kwargs.values())]
    # Autograd counts the versions of direct arguments, but not of lists.
    increment_versions([x for x in written if id(x) not in direct])
    originals = {id(reals[id(x)]): x for x in written}
    return tree_map(lambda result: originals.get(id(result), result), out) if originals else out


@cache
def _is_factory(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")


@cache
def _accumulates(func: Any) -> bool:
    """Whether increments add up in what is written, and must not be lost to rounding."""
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_")
    return name in ("add_", "sub_", "addcmul_", "addcdiv_", "lerp_")


@cache
def _is_view(func: Any) -> bool:
    """Whether the result aliases an argument that is not written; `view.dtype` reads bits, which real values do not have."""
    returns = [value.alias_info for value in func._schema.returns]
    return any(info is not None and not info.is_write for info in returns) and func is not aten.view.dtype


def _written(func: Any, args: Arguments, kwargs: Keywords) -> list[ScaledTensor]:
    """The ScaledTensors that the schema says are written."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, ScaledTensor)]
    return found
