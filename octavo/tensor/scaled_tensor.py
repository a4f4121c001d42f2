"""`ScaledTensor`: a tensor stored as low-precision codes and a scale, that behaves as the real tensor it stands for.

    real = codes / scale

Codes are E4M3, E5M2, FP16 or BF16; the scale is FP32, 0-d or one for each block of the last dim. It is a `torch.Tensor` (a
traceable wrapper subclass), so that parameters and gradients in FP8 work with code that has never heard of them: clipping,
GradScaler, weight tying, deepcopy, `F.linear`, stock optimizers. A look-alike that is no Tensor needs a fork of each library
that touches parameters. Three rules keep it right without knowing every operation:

1. *Unknown operations compute on real values.* Arguments are de-quantised to their logical dtype, and the result is plain.
2. *Writing re-quantises.* An operation that writes into a ScaledTensor runs on the real values, which are then cast back (see
   `storage`): a value that was not changed keeps its value, and one that is not finite turns the whole tensor into NaN.
3. *Views alias.* A view shares codes and scale, and remembers how it was made. Writing into a part of a tensor changes the scale
   of the whole, so a write replays the view on the real values of the whole, and re-quantises that.

Gradients accumulate: an E4M3 sum stops growing at 16 times its increment, for the increment is then under half a step. With
`residual_on_add` the first `add_` appends one byte to each code (E4M11, see `kernels.cast_residual`), and the sum keeps 11
mantissa bits; the code alone remains the nearest E4M3 value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.formats import FP32, Format
from octavo.kernels.untraced import untraced
from octavo.tensor.storage import Storage, check_parts, fresh_scale
from octavo.tensor.storage import uncast as uncast_parts


class ScaledTensor(Tensor):
    """A tensor with the real values `codes / scale`.

    Args:
        codes: FP8, FP16 or BF16, any shape.
        scale: FP32, positive; 0-d, or codes.shape[:-1] + (ceil(K / block),) if `block` is given.
        dtype: the logical dtype, which `tensor.dtype` shows and unknown operations compute in; a floating dtype of 16 bits or more.
        block: elements per scale along the last dim; None is one scale for the tensor.
        residual: int8, shape of `codes`, low bytes of E4M11 words; only with E4M3 and one scale.
        residual_on_add: append a residual at the first `add_`; for gradients, which accumulate.

    Raises `ValueError` if these do not fit together.
    """

    codes: Tensor
    residual_on_add: bool
    _storage: Storage
    _path: tuple[Callable[[Tensor], Tensor], ...]

    # Subclass behaviour comes from __torch_dispatch__ alone, below autograd; torch.compile needs this said.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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
        check_parts(codes, scale, dtype, block, residual, residual_on_add)
        return cls._wrap(Storage(codes, scale, residual, block), codes, (), dtype, residual_on_add)

    @classmethod
    @untraced
    def _wrap(
        cls, storage: Storage, codes: Tensor, path: tuple[Any, ...], dtype: torch.dtype, residual_on_add: bool
    ) -> ScaledTensor:
        """The part `codes` of `storage`, to which the views of `path` lead."""
        self = cls._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            codes.size(),
            strides=codes.stride(),
            storage_offset=codes.storage_offset(),
            dtype=dtype,
            device=codes.device,
        )
        self.codes, self.residual_on_add, self._storage, self._path = codes, residual_on_add, storage, path
        return self

    @property
    def scale(self) -> Tensor:
        """FP32 scale, 0-d or blocked. Raises `ValueError` for a view of a blocked tensor: its blocks are those of the whole."""
        if self.block is not None and self._path:
            raise ValueError(
                "a view of a blocked ScaledTensor has no scale of its own: clone() the view, or take the scale of the whole"
            )
        return self._storage.scale

    @property
    def residual(self) -> Tensor | None:
        """int8 low bytes of the E4M11 words, or None while there are only codes."""
        return None if self._storage.residual is None else self._replay(self._storage.residual)

    @property
    def block(self) -> int | None:
        """Elements per scale along the last dim, or None for one scale."""
        return self._storage.block

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return Format.of(self.codes.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The real values as a plain tensor of `dtype` (default: the logical dtype). Differentiable."""
        dtype = dtype or self.dtype
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, dtype)
        return self._real(dtype)

    def _real(self, dtype: torch.dtype) -> Tensor:
        if self.block is not None and self._path:
            return self._replay(self._storage.real(dtype)).contiguous()
        return uncast_parts(self.codes, self.scale, self.residual, self.block, dtype)

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
        for name in ("codes", "residual_on_add", "_storage", "_path"):
            setattr(self, name, getattr(value, name))

    def numpy(self, *, force: bool = False) -> Any:
        """The real values as a NumPy array, a copy."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """The real values as nested lists."""
        return self.dequantize().tolist()

    def share_memory_(self) -> ScaledTensor:
        """Moves codes, scale and residual to shared memory, in place."""
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether other processes can share the codes."""
        return self.codes.is_shared()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        if (
            type(self.codes) is not Tensor or self.is_meta
        ):  # no values; and a tracer would record what it takes to print them
            return f"ScaledTensor(..., size={tuple(self.shape)}, device={self.device}, format={self.format}{grad})"
        real = repr(self.detach().dequantize()).removeprefix("tensor(").removesuffix(")")
        scale = self.scale.item() if self.block is None else f"blocks of {self.block}"
        return f"ScaledTensor({real}, format={self.format}, scale={scale}{grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaledTensor:
        # As for nn.Parameter, the gradient and what others hung on the tensor (caches, hooks) are not copied.
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; detach() the ScaledTensor first")
        duplicate = self.detach().clone()
        assert isinstance(duplicate, ScaledTensor)
        memo[id(self)] = _like(duplicate, isinstance(self, torch.nn.Parameter), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # A dict, so that a later version can add an entry and still read an old file.
        state = {name: getattr(self, name) for name in _SAVED}
        state |= {"requires_grad": self.requires_grad, "parameter": isinstance(self, torch.nn.Parameter)}
        return _rebuild, (state,)

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        names = ["codes", "scale"] if self._storage.residual is None else ["codes", "scale", "residual"]
        return names, (self.dtype, self.block, self.residual_on_add)

    @staticmethod
    @untraced
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple, outer_size: Any, outer_stride: Any
    ) -> ScaledTensor:
        dtype, block, residual_on_add = context
        storage = Storage(inner["codes"], inner["scale"], inner.get("residual"), block)
        return ScaledTensor._wrap(storage, inner["codes"], (), dtype, residual_on_add)

    def _stable_hash_for_caching(self) -> str:
        """Key of compiled graphs in the cache of torch.compile: everything but the values."""
        parts = [getattr(self, name) for name in self.__tensor_flatten__()[0]]
        layouts = [(part.dtype, tuple(part.shape), part.stride(), part.device) for part in parts]
        return f"{type(self).__name__}{self.__tensor_flatten__()[1]}{layouts}{self.requires_grad}"

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from octavo.tensor.dispatch import dispatch  # it knows this class

        return dispatch(func, args, kwargs or {})


def cast(
    x: Tensor,
    fmt: Format,
    scale: Tensor | float | None = None,
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
        scale: finite and positive: a number, or FP32, 0-d or one per block. None takes the largest power of two with which the
            tensor (or block) does not saturate; if a value is not finite, all codes (of the block) are NaN and the scale is 1.
        rounding, key, offset, block: see `kernels.cast`.
        dtype: logical dtype of the result; default that of `x`.
        residual_on_add: see `ScaledTensor`.

    Raises `ValueError` if `x` is not floating, `fmt` is no format that needs a scale, the scale is a number or in CPU memory and
    not finite and positive (on a GPU, looking would wait for it), or the rest does not fit together.
    """
    if not x.is_floating_point():
        raise ValueError(f"cast takes floating-point values, but x is {x.dtype}: convert it first, x.float()")
    if not isinstance(fmt, Format):
        raise ValueError(f"fmt is {fmt!r}, which is no Format: use octavo.E4M3, E5M2, FP16 or BF16")
    if fmt is FP32:
        raise ValueError("FP32 needs no scale: keep the plain tensor, or cast to E4M3, E5M2, FP16 or BF16")
    real = uncast(x.detach(), torch.float32) if isinstance(x, ScaledTensor) else x
    if scale is None:
        scale, multiplier = fresh_scale(real, fmt, block)
    else:
        multiplier = _usable_scale(scale, x.device)
        scale = multiplier.clone()  # the result changes its own when it is written
    codes = kernels.cast(real, multiplier, fmt.dtype, rounding=rounding, key=key, offset=offset, block=block)
    return ScaledTensor(codes, scale, dtype or x.dtype, block=block, residual_on_add=residual_on_add)


def _usable_scale(scale: Tensor | float, device: torch.device) -> Tensor:
    """`scale` as a tensor, a number as FP32 on `device`; checked if that does not wait for a device and there is a value to see."""
    tensor = scale if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32)
    if type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = tensor[~((tensor > 0) & tensor.isfinite())]
        if wrong.numel():
            raise ValueError(f"scale is {wrong[0].item()}: it must be finite and positive; None chooses it")
    return tensor if isinstance(scale, Tensor) else tensor.to(device)


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
        return x._real(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


_SAVED = ("codes", "scale", "dtype", "block", "residual", "residual_on_add")


def _rebuild(state: dict[str, Any]) -> ScaledTensor:
    """Reads what `__reduce_ex__` wrote, without running code from the file: `torch.load(weights_only=True)` allows it."""
    return _like(ScaledTensor(**{name: state[name] for name in _SAVED}), state["parameter"], state["requires_grad"])


torch.serialization.add_safe_globals([_rebuild])


def _like(x: ScaledTensor, parameter: bool, requires_grad: bool) -> Any:
    return torch.nn.Parameter(x, requires_grad) if parameter else x.requires_grad_(requires_grad)
