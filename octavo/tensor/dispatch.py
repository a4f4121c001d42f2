"""What operations do to ScaledTensors; called below autograd, in place of each operator that has one among its arguments.

Few operators are known: those that keep codes as they are (clone, copy, change of device or logical dtype), those that only
need shapes (zeros_like), those that lose nothing in the scale (multiplication by a number) and those that would lose too much
(accumulation). Views are known by their schema, and run on the codes. All others compute on real values, and the schema says
which arguments they wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from octavo.tensor.scaled_tensor import ScaledTensor, uncast
from octavo.tensor.storage import Storage, is_logical

aten = torch.ops.aten
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def dispatch(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """The result of operator `func`. Raises `NotImplementedError` for a change of shape in place."""
    for handler in (_HANDLERS.get(func), _factory, _view, _decompose):
        if handler is not None:
            out = handler(func, args, kwargs)
            if out is not NotImplemented:
                return out
    return _compute(func, args, kwargs)


# --- any operator: the handlers return NotImplemented where they do not apply


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


def _detach(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """`_view` for the one view that every step takes of each gradient, when autograd stores it. (A tracer needs aliases kept.)"""
    x, plain = args[0], type(args[0].codes) is Tensor
    return ScaledTensor._wrap(x._storage, x.codes, x._path, x.dtype, x.residual_on_add) if plain else NotImplemented


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
    _increment_versions([x for x in written if id(x) not in direct])
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


def _increment_versions(tensors: Iterable[Tensor]) -> None:
    increment_version([x for x in tensors if not x.is_inference()])


def _written(func: Any, args: Arguments, kwargs: Keywords) -> list[ScaledTensor]:
    """The ScaledTensors that the schema says are written."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, ScaledTensor)]
    return found


# --- known operators


def _is_whole(x: Any) -> bool:
    """Whether `x` is a ScaledTensor, and no view of a part of one."""
    return isinstance(x, ScaledTensor) and not x._path


def _map(x: ScaledTensor, function: Callable[..., Tensor], kwargs: Keywords, dtype: torch.dtype) -> Any:
    """`function(part, **kwargs)` of codes, scale and residual, as a ScaledTensor of its own."""
    if x.block is not None and x._path:
        return NotImplemented  # blocks have no view, so there is no scale for this part
    # The scale has strides of its own.
    scale = function(x.scale, **{name: value for name, value in kwargs.items() if name != "memory_format"})
    residual = None if x.residual is None else function(x.residual, **kwargs)
    codes = function(x.codes, **kwargs)
    return ScaledTensor._wrap(Storage(codes, scale, residual, x.block), codes, (), dtype, x.residual_on_add)


def _clone(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    return _map(args[0], func, kwargs, args[0].dtype)


def _to_copy(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Changes the logical dtype only, so that `half().float()` loses nothing."""
    dtype = kwargs.get("dtype") or args[0].dtype
    if not is_logical(dtype):
        return NotImplemented
    return _map(args[0], func, {name: value for name, value in kwargs.items() if name != "dtype"}, dtype)


def _empty(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A tensor of the same kind: for `Module.to_empty`, and for the copy that autograd makes of a first gradient."""
    x, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    same_shape = func is aten.empty_like.default or tuple(args[1]) == tuple(x.shape)
    if not same_shape or not is_logical(dtype) or (x.block is not None and x._path):
        return NotImplemented
    codes = func(x.codes, *args[1:], **{name: value for name, value in kwargs.items() if name != "dtype"})
    scale = torch.ones(x.scale.shape, device=codes.device, dtype=torch.float32)
    return ScaledTensor._wrap(Storage(codes, scale, None, x.block), codes, (), dtype, x.residual_on_add)


def _copy(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Codes and scale as they are if both sides store them alike; else a fresh cast, without reading the old values."""
    x, source = args[:2]
    if not _is_whole(x):
        return NotImplemented
    storage = x._storage
    alike = isinstance(source, ScaledTensor) and (source.codes.dtype, source.block) == (x.codes.dtype, x.block)
    if alike and source.block is not None:
        alike = not source._path
    if alike and source.shape == x.shape and (source.residual is None or x.residual_on_add):
        x.codes.copy_(source.codes, *args[2:], **kwargs)
        x.scale.copy_(source.scale, *args[2:], **kwargs)
        storage.write_residual(source.residual)
        storage.mark_written()
    else:
        storage.requantise(uncast(source).to(x.device).expand(x.shape), residual=storage.residual is not None)
    return x


def _zero(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    for part in (args[0].codes, args[0].residual):
        if part is not None:
            part.zero_()
    args[0]._storage.mark_written()
    return args[0]


def _uniform(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Rounds no sample onto a bound: a uniform sample of [-1, 1) may be followed by erfinv, as in trunc_normal_."""
    x = args[0]
    low, high = args[1:] + (0.0, 1.0)[len(args) - 1 :]
    margin = 0.75 * (2.0**-11 if x.residual is not None else x.format.eps)  # more than half a step
    low_inside, high_inside = low + abs(low) * margin, high - abs(high) * margin
    sample = torch.empty_like(x.codes, dtype=x.dtype).uniform_(low, high, **kwargs)
    if low_inside < high_inside:
        sample.clamp_(low_inside, high_inside)
    return x.copy_(sample)


def _add(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Accumulation of a gradient: an FP32 sum, stored with a residual."""
    x, other = args[:2]
    if not _is_whole(x) or not x.residual_on_add:
        return NotImplemented
    if _is_whole(other) and not kwargs and x._storage.accumulates(other._storage):
        x._storage.accumulate(other._storage)
        return x
    other = uncast(other, torch.float32) if isinstance(other, Tensor) else other
    x._storage.requantise(x._storage.real(torch.float32).add_(other, **kwargs), residual=True)
    return x


def _rescale(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Multiplication or division by one number."""
    x, factor = args[:2]
    if not _is_whole(x) or kwargs:
        return NotImplemented
    divides = func is aten.div_.Tensor
    if isinstance(factor, (int, float)) and 0 < factor < math.inf:
        x._storage.divide_scale(1 / factor if divides else factor)
    elif isinstance(factor, Tensor) and factor.dim() == 0 and factor.is_floating_point():
        factor = uncast(factor, torch.float32).to(x.device)
        x._storage.multiply(factor.reciprocal() if divides else factor)
    else:
        return NotImplemented
    return x


def _each(func: Any, args: Arguments, kwargs: Keywords) -> None:
    """Lists of tensors one by one, as above, which needs the memory of only one in high precision."""
    tensors, other = args[:2]
    operator = getattr(Tensor, func._schema.name.removeprefix("aten::_foreach_"))
    others = other if isinstance(other, (list, tuple)) else [other] * len(tensors)
    for x, y in zip(tensors, others, strict=True):
        operator(x, y, **kwargs)
    _increment_versions(tensors)


def _pin_memory(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    return _map(args[0], func, kwargs, args[0].dtype)


def _is_pinned(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    return func(args[0].codes, *args[1:], **kwargs)


def _record_stream(func: Any, args: Arguments, kwargs: Keywords) -> None:
    storage = args[0]._storage
    for part in (storage.codes, storage.scale, storage.residual):
        if part is not None:
            func(part, *args[1:], **kwargs)


_HANDLERS: dict[Any, Callable[[Any, Arguments, Keywords], Any]] = {
    aten.detach.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty,
    aten.new_empty_strided.default: _empty,
    aten.copy_.default: _copy,
    aten.zero_.default: _zero,
    aten.uniform_.default: _uniform,
    aten.add_.Tensor: _add,
    aten.mul_.Tensor: _rescale,
    aten.div_.Tensor: _rescale,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.record_stream.default: _record_stream,
    **{
        getattr(packet, overload): _each
        for packet in (aten._foreach_add_, aten._foreach_mul_, aten._foreach_div_)
        for overload in packet.overloads()
    },
}
