"""`ScaledTensor`: a tensor stored as low-precision codes and a scale, that behaves as the real tensor it stands for.

    real = codes / scale                 codes: E4M3, E5M2, FP16 or BF16; scale: FP32, 0-d or one per block of the last dim

It is a `torch.Tensor` (a traceable wrapper subclass), so that parameters and gradients in FP8 work with code that has never
heard of them: clipping, GradScaler, weight tying, deepcopy, `F.linear`, stock optimizers. A look-alike that is no Tensor needs a
fork of each library that touches parameters. Three rules keep it right without knowing every operation:

1. *Unknown operations compute on real values.* All arguments are de-quantised to their logical dtype and the result is plain.
2. *Writing re-quantises.* An operation that its schema says writes into a ScaledTensor runs on the real values, which are then
   cast back with a fresh power-of-two scale, rounded to nearest. Such a scale makes the cast idempotent: a value that was not
   changed keeps its value. If any real value is not finite, all codes become NaN and the scale 1: a bad gradient stays visible
   where saturation would hide it, and scales stay finite and positive.
3. *Views alias.* A view shares codes and scale, and remembers how it was made. Writing into a part of a tensor changes the scale
   of the whole, so a write replays the view on the real values of the whole and re-quantises that.

Gradients accumulate: an E4M3 sum stops growing at 16 times its increment, for the increment is then under half a step. With
`residual_on_add` the first `add_` appends one byte for each code (E4M11, see `kernels.cast_residual`), and the sum keeps 11
mantissa bits; the code alone remains the nearest E4M3 value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from octavo import kernels
from octavo.formats import BF16, E4M3, FP32, Format

aten = torch.ops.aten


class _Store:
    """What a ScaledTensor shares with its views: the codes of the whole tensor, its scale and its residual."""

    __slots__ = ("block", "codes", "residual", "scale")

    def __init__(self, codes: Tensor, scale: Tensor, residual: Tensor | None, block: int | None) -> None:
        self.codes, self.scale, self.residual, self.block = codes, scale, residual, block

    def real(self, dtype: torch.dtype) -> Tensor:
        """The real values of the whole tensor, with the strides of its codes so that views replay."""
        real = _real(self.codes, self.scale, self.residual, self.block, dtype)
        return real if self.codes.is_contiguous() else torch.empty_like(self.codes, dtype=dtype).copy_(real)

    def write(self, real: Tensor, with_residual: bool) -> None:
        """Re-quantises the whole tensor in place."""
        scale, multiplier = _fresh_scale(real, Format.of(self.codes.dtype), self.block)
        if with_residual:
            codes, residual = kernels.cast_residual(real, multiplier)
            self.write_residual(residual)
        else:
            codes = kernels.cast(real, multiplier, self.codes.dtype, block=self.block)
        self.codes.copy_(codes)
        self.scale.copy_(scale)

    def write_residual(self, residual: Tensor | None) -> None:
        if self.residual is None:
            self.residual = None if residual is None else torch.empty_like(self.codes, dtype=torch.int8).copy_(residual)
        elif residual is None:
            self.residual.zero_()
        else:
            self.residual.copy_(residual)


class ScaledTensor(Tensor):
    """A tensor with the real values `codes / scale`.

    Args:
        codes: FP8, FP16 or BF16, any shape.
        scale: FP32, positive; 0-d, or codes.shape[:-1] + (ceil(K / block),) if `block` is given.
        dtype: the logical dtype, which `tensor.dtype` shows and unknown operations compute in; a floating dtype of 16 bits or more.
        block: elements per scale along the last dim; None is one scale for the tensor. A view of a blocked tensor that changes
            its shape is a plain copy.
        residual: int8, shape of `codes`, low bytes of E4M11 words; only with E4M3 and one scale.
        residual_on_add: append a residual at the first `add_`; for gradients, which accumulate.

    Raises `ValueError` if these do not fit together.
    """

    codes: Tensor
    residual_on_add: bool
    _store: _Store
    _path: tuple[Callable[[Tensor], Tensor], ...]

    # Subclass behaviour comes from __torch_dispatch__ alone, below autograd; torch.compile needs this said.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor,
        dtype: torch.dtype = torch.float32,
        *,
        block: int | None = None,
        residual: Tensor | None = None,
        residual_on_add: bool = False,
    ) -> ScaledTensor:
        _check(codes, scale, dtype, block, residual, residual_on_add)
        return _wrap(_Store(codes, scale, residual, block), codes, (), dtype, residual_on_add)

    @property
    def scale(self) -> Tensor:
        """FP32 scale, 0-d or blocked."""
        return self._store.scale

    @property
    def residual(self) -> Tensor | None:
        """int8 low bytes of the E4M11 words, or None while there are only codes."""
        return None if self._store.residual is None else self._replay(self._store.residual)

    @property
    def block(self) -> int | None:
        """Elements per scale along the last dim, or None for one scale."""
        return self._store.block

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return Format.of(self.codes.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The real values as a plain tensor of `dtype` (default: the logical dtype). Differentiable."""
        dtype = dtype or self.dtype
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, dtype)
        return _real(self.codes, self.scale, self.residual, self.block, dtype)

    def _replay(self, whole: Tensor) -> Tensor:
        """The part of `whole` that this tensor is of its store."""
        for step in self._path:
            whole = step(whole)
        return whole

    @property
    def data(self) -> Tensor:
        """As `torch.Tensor.data`: the same memory, unknown to autograd. Setting it to a plain tensor quantises that."""
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ScaledTensor):
            value = cast(value, self.format, block=self.block, residual_on_add=self.residual_on_add)
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in ("codes", "residual_on_add", "_store", "_path"):
            setattr(self, name, getattr(value, name))

    def numpy(self, *, force: bool = False) -> Any:
        """The real values as a NumPy array, a copy."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """The real values as nested lists."""
        return self.dequantize().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        real = repr(self.detach().dequantize()).removeprefix("tensor(").removesuffix(")")
        scale = self.scale.tolist() if self.scale.dim() == 0 and not self.is_meta else f"{tuple(self.scale.shape)}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"ScaledTensor({real}, format={self.format}, scale={scale}{grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaledTensor:
        # As for nn.Parameter, the gradient and what others hung on the tensor (caches, hooks) are not copied.
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; detach() the ScaledTensor first")
        duplicate = self.detach().clone()
        duplicate.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            duplicate = torch.nn.Parameter(duplicate, self.requires_grad)
        memo[id(self)] = duplicate
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # A dict, so that a later version can add an entry and still read an old file.
        state = {
            "codes": self.codes,
            "scale": self.scale,
            "dtype": self.dtype,
            "block": self.block,
            "residual": self.residual,
            "residual_on_add": self.residual_on_add,
            "requires_grad": self.requires_grad,
            "parameter": isinstance(self, torch.nn.Parameter),
        }
        return _rebuild, (state,)

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        names = ["codes", "scale"] if self._store.residual is None else ["codes", "scale", "residual"]
        return names, (self.dtype, self.block, self.residual_on_add)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple, outer_size: Any, outer_stride: Any
    ) -> ScaledTensor:
        dtype, block, residual_on_add = context
        store = _Store(inner["codes"], inner["scale"], inner.get("residual"), block)
        return _wrap(store, inner["codes"], (), dtype, residual_on_add)

    def _stable_hash_for_caching(self) -> str:
        """Key of compiled graphs in the cache of torch.compile: everything but the values."""
        parts = [getattr(self, name) for name in self.__tensor_flatten__()[0]]
        layouts = [(part.dtype, tuple(part.shape), part.stride(), part.device) for part in parts]
        return f"{type(self).__name__}{self.__tensor_flatten__()[1]}{layouts}{self.requires_grad}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = _HANDLERS.get(func, _not_special)(func, args, kwargs)
        if out is NotImplemented and _is_factory(func):
            out = _factory(func, args, kwargs)
        if out is NotImplemented and _is_view(func):
            out = _view(func, args, kwargs)
        if out is NotImplemented:  # composites arrive whole in inference mode; their parts may be views
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            out = _compute(func, args, kwargs)
        return out


def cast(
    x: Tensor,
    fmt: Format,
    scale: Tensor | None = None,
    rounding: str = "nearest",
    *,
    block: int | None = None,
    dtype: torch.dtype | None = None,
    key: Tensor | None = None,
    offset: int = 0,
    residual_on_add: bool = False,
) -> ScaledTensor:
    """The ScaledTensor nearest to `x`: codes = saturate(round(x * scale)).

    Args:
        x: any shape and floating dtype.
        fmt: E4M3, E5M2, FP16 or BF16.
        scale: FP32; 0-d, or one per block. None takes the largest power of two with which the tensor (or block) does not
            saturate; if a value is not finite, all codes (of the block) are NaN and the scale is 1.
        rounding, key, offset, block: see `kernels.cast`.
        dtype: logical dtype of the result; default that of `x`.
        residual_on_add: see `ScaledTensor`.

    Raises `ValueError` if `x` is not floating, `fmt` needs no scale, or the rest does not fit together.
    """
    if not x.is_floating_point():
        raise ValueError(f"cast takes floating-point values, but x is {x.dtype}: convert it first, x.float()")
    if fmt is FP32:
        raise ValueError("FP32 needs no scale: keep the plain tensor, or cast to E4M3, E5M2, FP16 or BF16")
    real = x.dequantize() if isinstance(x, ScaledTensor) else x
    multiplier = scale
    if scale is None or multiplier is None:
        scale, multiplier = _fresh_scale(real, fmt, block)
    codes = kernels.cast(real, multiplier, fmt.dtype, rounding=rounding, key=key, offset=offset, block=block)
    return ScaledTensor(codes, scale, dtype or x.dtype, block=block, residual_on_add=residual_on_add)


def uncast(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The real values of a ScaledTensor, of `dtype` or its logical dtype; a plain tensor is returned as it is, or in `dtype`."""
    if isinstance(x, ScaledTensor):
        return x.dequantize(dtype)
    return x if dtype is None else x.to(dtype)


class _Dequantize(torch.autograd.Function):
    """Real values in forward, identity in backward: quantisation is not differentiated."""

    @staticmethod
    def forward(ctx: Any, x: ScaledTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return _real(x.codes, x.scale, x.residual, x.block, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _check(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, block: int | None, residual: Tensor | None, residual_on_add: bool
) -> None:
    if codes.dtype is torch.float32 or not codes.is_floating_point():
        raise ValueError(f"codes are {codes.dtype}: use float8_e4m3fn, float8_e5m2, float16 or bfloat16")
    Format.of(codes.dtype)
    if not _is_logical(dtype):
        raise ValueError(f"the logical dtype is {dtype}: use a floating dtype of at least 16 bits")
    wanted = () if block is None else (*codes.shape[:-1], -(-codes.shape[-1] // block))
    if scale.dtype is not torch.float32 or tuple(scale.shape) != wanted:
        raise ValueError(
            f"scale is {scale.dtype} {tuple(scale.shape)}: codes {tuple(codes.shape)} with block={block} need float32 {wanted}"
        )
    if (residual is not None or residual_on_add) and (codes.dtype is not E4M3.dtype or block is not None):
        raise ValueError(
            f"a residual extends E4M3 codes with one scale, but these are {codes.dtype} with block={block}"
        )
    if residual is not None and (residual.dtype is not torch.int8 or residual.shape != codes.shape):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}: codes need int8 {tuple(codes.shape)}")


def _is_logical(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _wrap(store: _Store, codes: Tensor, path: tuple, dtype: torch.dtype, residual_on_add: bool) -> ScaledTensor:
    self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        ScaledTensor,
        codes.size(),
        strides=codes.stride(),
        storage_offset=codes.storage_offset(),
        dtype=dtype,
        device=codes.device,
    )
    self.codes, self.residual_on_add, self._store, self._path = codes, residual_on_add, store, path
    return self


def _map(x: ScaledTensor, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> ScaledTensor:
    """A ScaledTensor of its own with `function` applied to codes, scale and residual."""
    residual = None if x.residual is None else function(x.residual)
    codes = function(x.codes)
    return _wrap(_Store(codes, function(x.scale), residual, x.block), codes, (), dtype or x.dtype, x.residual_on_add)


def _real(codes: Tensor, scale: Tensor, residual: Tensor | None, block: int | None, dtype: torch.dtype) -> Tensor:
    if residual is not None:
        return kernels.uncast_residual(codes, residual, scale, dtype)
    return kernels.uncast(codes, scale, dtype, block=block)


def _fresh_scale(real: Tensor, fmt: Format, block: int | None) -> tuple[Tensor, Tensor]:
    """(scale, multiplier): the scale to store, and what to cast with, which is NaN where a value is not finite."""
    amax = kernels.amax(real, block=block)
    # BF16 has the range of FP32: scaled to its maximum, it would leave no room for the scale to follow a multiplication.
    scale = torch.ones_like(amax) if fmt is BF16 else kernels.scale_from_amax(amax, fmt.max)
    return scale, torch.where(amax.isfinite(), scale, torch.nan)


def _rebuild(state: dict[str, Any]) -> ScaledTensor:
    names = ("codes", "scale", "dtype", "block", "residual", "residual_on_add")
    x = ScaledTensor(**{name: state[name] for name in names}).requires_grad_(state["requires_grad"])
    return torch.nn.Parameter(x, state["requires_grad"]) if state["parameter"] else x  # type: ignore[return-value]


torch.serialization.add_safe_globals([_rebuild])


# What operations do ---------------------------------------------------------------------------------------------------


@cache
def _is_view(func: Any) -> bool:
    """Whether the result aliases an argument that is not written. `view.dtype` reads bits, which a ScaledTensor has not."""
    returns = [r.alias_info for r in func._schema.returns]
    return any(info is not None and not info.is_write for info in returns) and func is not aten.view.dtype


@cache
def _is_factory(func: Any) -> bool:
    """Whether only shape, dtype and device of the first argument matter: zeros_like, new_full and so on."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[ScaledTensor]:
    """The ScaledTensors that the schema says are written."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, ScaledTensor)]
    return found


def _compute(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Computes on real values; what was written is re-quantised."""
    written = _written(func, args, kwargs)
    stores = {id(x._store): (x._store, x._store.real(x.dtype)) for x in written}
    reals: dict[int, Tensor] = {}

    def unwrap(x: Any) -> Any:
        if not isinstance(x, ScaledTensor):
            return x
        if id(x) not in reals:  # one real tensor for each argument, however often it is given
            shared = stores.get(id(x._store))
            reals[id(x)] = x.dequantize() if shared is None else x._replay(shared[1])
        return reals[id(x)]

    out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    for store, real in stores.values():
        if real.shape != store.codes.shape:
            raise NotImplementedError(
                f"{func} changes the shape of a ScaledTensor in place: use the form that returns a view"
            )
    for store, real in stores.values():
        store.write(real, with_residual=store.residual is not None)
    for x in written:
        if not any(x is argument for argument in (*args, *kwargs.values())):
            torch.autograd.graph.increment_version(x)  # autograd does not do it for lists of tensors
    originals = {id(reals[id(x)]): x for x in written}
    return tree_map(lambda y: originals.get(id(y), y), out)


def _view(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    same = func in (aten.detach.default, aten.alias.default)
    if not isinstance(x, ScaledTensor) or (x.block is not None and not same):
        return NotImplemented

    def wrap(codes: Tensor, pick: Callable[[Any], Tensor]) -> ScaledTensor:
        path = x._path if same else (*x._path, lambda whole: pick(func(whole, *args[1:], **kwargs)))
        return _wrap(x._store, codes, path, x.dtype, x.residual_on_add)

    out = func(x.codes, *args[1:], **kwargs)
    if isinstance(out, Tensor):
        out = wrap(out, lambda y: y)
    else:
        out = [wrap(codes, lambda y, i=i: y[i]) for i, codes in enumerate(out)]
    return return_and_correct_aliasing(func, args, kwargs, out)


def _factory(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A plain tensor: new values, such as optimizer states, should not inherit few bits."""
    x = args[0]
    kwargs = {**kwargs, "device": kwargs.get("device") or x.device}
    return func(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *args[1:], **kwargs)


def _not_special(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return NotImplemented


def _clone(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _map(args[0], lambda part: func(part, **(kwargs if part.dim() else {})))


def _to_copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A change of dtype changes the logical dtype only: `half().float()` is no change."""
    x, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if not _is_logical(dtype):
        return NotImplemented
    kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
    scalar = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return _map(x, lambda part: func(part, **(kwargs if part.dim() else scalar)), dtype)


def _empty_like(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The same kind of tensor, for `Module.to_empty` and for the clone that autograd makes of a first gradient."""
    x, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if not _is_logical(dtype) or (func is aten.new_empty_strided.default and tuple(args[1]) != tuple(x.shape)):
        return NotImplemented
    kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
    codes = func(x.codes, *args[1:], **kwargs)
    scale = torch.ones(x.scale.shape, dtype=torch.float32, device=codes.device)
    return _wrap(_Store(codes, scale, None, x.block), codes, (), dtype, x.residual_on_add)


def _copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Codes and scale as they are where both sides store them alike; else a fresh cast, without reading the old values."""
    to, source = args[:2]
    if not isinstance(to, ScaledTensor) or to._path:
        return NotImplemented
    exact = isinstance(source, ScaledTensor) and (source.codes.dtype, source.block) == (to.codes.dtype, to.block)
    if exact and source.shape == to.shape and (source.residual is None or to.residual_on_add):
        to.codes.copy_(source.codes, *args[2:], **kwargs)
        to.scale.copy_(source.scale, *args[2:], **kwargs)
        to._store.write_residual(source.residual)
    else:
        real = uncast(source).to(to.device).expand(to.shape)
        to._store.write(real, with_residual=to.residual is not None)
    return to


def _zero(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    for part in (x.codes, x.residual):
        if part is not None:
            part.zero_()
    return x


def _add(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Accumulation of a gradient: FP32 sum, stored with a residual byte."""
    x, other = args[:2]
    if not isinstance(x, ScaledTensor) or not x.residual_on_add or x._path:
        return NotImplemented
    other = uncast(other, torch.float32) if isinstance(other, Tensor) else other
    x._store.write(x._store.real(torch.float32).add_(other, **kwargs), with_residual=True)
    return x


def _rescale(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Multiplication or division by a positive number changes the scale only, and loses nothing."""
    x, factor = args[:2]
    if kwargs or not isinstance(x, ScaledTensor) or x._path or not isinstance(factor, (int, float)):
        return NotImplemented
    if not 0 < factor < math.inf:
        return NotImplemented
    scale = x.scale.div(factor) if func is aten.mul_.Tensor else x.scale.mul(factor)
    x.scale.copy_(scale.clamp_(2.0**-126, 2.0**126))
    return x


def _pin_memory(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _map(args[0], lambda part: func(part, *args[1:], **kwargs))


def _is_pinned(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return func(args[0].codes, *args[1:], **kwargs)


def _record_stream(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    for part in (args[0].codes, args[0].scale, args[0].residual):
        if part is not None:
            func(part, *args[1:], **kwargs)


_HANDLERS: dict[Any, Callable[[Any, tuple, dict[str, Any]], Any]] = {
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.new_empty_strided.default: _empty_like,
    aten.copy_.default: _copy,
    aten.zero_.default: _zero,
    aten.add_.Tensor: _add,
    aten.mul_.Tensor: _rescale,
    aten.div_.Tensor: _rescale,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.record_stream.default: _record_stream,
}
