"""The operators that are known to ScaledTensors: what each does to codes, scale and residual, without de-quantising where it can.

They keep codes as they are (clone, copy, change of device or logical dtype), lose nothing in the scale (multiplication by a number),
or would lose too much if they were computed as any other (accumulation, uniform samples). A handler takes the operator and its
arguments, and returns NotImplemented where it does not apply: then `octavo.tensor.dispatch` computes on real values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from octavo.tensor.scaled_tensor import ScaledTensor, uncast
from octavo.tensor.storage import Storage, is_logical

aten = torch.ops.aten
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def increment_versions(tensors: Iterable[Tensor]) -> None:
    """Tell autograd that these were written. (A tensor of inference mode has no version.)"""
    increment_version([x for x in tensors if not x.is_inference()])


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


def _detach(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """The one view that every step takes of each gradient, when autograd stores it: `dispatch` would find it by its schema, slower.

    (A tracer needs aliases kept.)
    """
    x, plain = args[0], type(args[0].codes) is Tensor
    return ScaledTensor._wrap(x._storage, x.codes, x._path, x.dtype, x.residual_on_add) if plain else NotImplemented


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
    increment_versions(tensors)


def _pin_memory(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    return _map(args[0], func, kwargs, args[0].dtype)


def _is_pinned(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    return func(args[0].codes, *args[1:], **kwargs)


def _record_stream(func: Any, args: Arguments, kwargs: Keywords) -> None:
    storage = args[0]._storage
    for part in (storage.codes, storage.scale, storage.residual):
        if part is not None:
            func(part, *args[1:], **kwargs)


HANDLERS: dict[Any, Callable[[Any, Arguments, Keywords], Any]] = {
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
"""Operator → its handler."""
