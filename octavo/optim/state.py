"""The state of the optimizer as plain tensors: its formats, how it begins, how it is saved and loaded.

State of a parameter: `step` (FP32, 0-d), `exp_avg`, `exp_avg_sq` (v, or √v if the recipe says so), and where the format needs
scales `exp_avg_scale`, `exp_avg_sq_scale`: FP32, 0-d, or one per block of the flattened tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.formats import BF16, E4M3, FP16, FP32, Format
from octavo.kernels.reference.adamw import UpdateFormats, has_scale
from octavo.recipe import Recipe
from octavo.tensor import ScaledTensor, cast

PLAIN = tuple(fmt.dtype for fmt in (FP32, BF16, FP16))
"""Dtypes of plain parameters and gradients."""

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Slot:
    """What a step needs of one parameter, as plain tensors."""

    param: Tensor
    codes: Tensor
    scale: Tensor | None
    grad: Tensor
    grad_scale: Tensor | None
    residual: Tensor | None
    offset: int
    """Index of the first element among all elements of the optimizer."""
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors that a step rewrites."""
        return self.codes, self.exp_avg, self.exp_avg_sq

    @property
    def kind(self) -> tuple:
        """All that `update_formats` depends on, within one optimizer."""
        first, second = self.exp_avg_scale, self.exp_avg_sq_scale
        return (
            self.scale is None,
            self.codes.dtype,
            self.exp_avg.dtype,
            self.exp_avg_sq.dtype,
            first is not None and first.dim() == 1,
            second is not None and second.dim() == 1,
        )

    @property
    def fingerprint(self) -> tuple:
        """Changes when anybody but the kernel writes into one of the stored tensors, or replaces it."""
        codes, first, second = self.codes, self.exp_avg, self.exp_avg_sq
        return (
            codes.data_ptr(),
            first.data_ptr(),
            second.data_ptr(),
            codes._version,
            first._version,
            second._version,
        )

    def numbers(self, formats: UpdateFormats, maxima: Tensor, grad_amax: Tensor) -> kernels.Numbers:
        """The small tensors, for `kernels.adamw_prepare`."""
        return kernels.Numbers(
            self.step,
            self.scale,
            None if formats.exp_avg_block else self.exp_avg_scale,
            None if formats.exp_avg_sq_block else self.exp_avg_sq_scale,
            maxima,
            self.grad_scale,
            grad_amax,
        )

    def operands(self, formats: UpdateFormats) -> kernels.Operands:
        """The large tensors, for `kernels.adamw`."""
        return kernels.Operands(
            self.codes.contiguous(),
            self.grad,
            self.residual,
            self.exp_avg,
            self.exp_avg_sq,
            self.exp_avg_scale if formats.exp_avg_block else None,
            self.exp_avg_sq_scale if formats.exp_avg_sq_block else None,
            self.offset,
        )


def gradient(param: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(codes or plain values, scale, residual) of the gradient, contiguous. Raises `ValueError` if it cannot be used."""
    grad = param.grad
    assert grad is not None
    if isinstance(grad, ScaledTensor):
        codes, residual = grad.codes, grad.residual
        if codes.dtype is E4M3.dtype and grad.block is None:
            return codes.contiguous(), grad.scale, None if residual is None else residual.contiguous()
        grad = grad.dequantize(torch.float32)
    if grad.layout is not torch.strided:
        raise ValueError(
            f"the gradient of a parameter {tuple(param.shape)} is sparse: use Embedding(..., sparse=False)"
        )
    if grad.dtype not in PLAIN:
        raise ValueError(
            f"the gradient of a parameter {tuple(param.shape)} is {grad.dtype}: it must be FP32, BF16, FP16 or a ScaledTensor"
        )
    return grad.contiguous(), None, None


def has_small_moments(param: Tensor, recipe: Recipe) -> bool:
    """Whether the moments of `param` are in the recipe's formats; a converted one is told by itself or by its gradient."""
    if recipe.moments_of == "matrices" and param.dim() >= 2:
        return True
    return isinstance(param, ScaledTensor) or isinstance(param.grad, ScaledTensor)


def initial_state(param: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    """Zero moments: in the recipe's formats if `has_small_moments`, else FP32."""
    small = has_small_moments(param, recipe)
    state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
    for name in MOMENTS:
        fmt: Format = getattr(recipe, name) if small else FP32
        block: int | None = getattr(recipe, f"{name}_block") if small else None
        state[name] = torch.zeros(param.shape, dtype=fmt.dtype, device=param.device)
        if block is not None or has_scale(fmt):
            shape = () if block is None else (-(-param.numel() // block),)
            state[f"{name}_scale"] = torch.ones(shape, dtype=torch.float32, device=param.device)
    return state


def store_moments(state: dict[str, Tensor], recipe: Recipe) -> None:
    """Puts FP32 moments, as a stock optimizer leaves them, into the formats of the recipe."""
    for name in MOMENTS:
        fmt: Format = getattr(recipe, name)
        block: int | None = getattr(recipe, f"{name}_block")
        values = state[name].float()
        if fmt is FP32:
            continue
        if name == "exp_avg_sq" and recipe.sqrt_exp_avg_sq:
            values = values.sqrt()
        if block is None and not has_scale(fmt):
            state[name] = values.to(fmt.dtype)
        else:
            stored = cast(values.reshape(-1), fmt, block=block)
            state[name], state[f"{name}_scale"] = stored.codes.view(values.shape), stored.scale


def update_formats(param: Tensor, state: dict[str, Tensor], recipe: Recipe, decoupled: bool) -> UpdateFormats:
    """The formats that parameter and state *have*: a state loaded from torch.optim.AdamW is FP32 where a new one would not be."""
    formats = {name: Format.of(state[name].dtype) for name in MOMENTS}
    blocked = {name: _is_blocked(state, name) for name in MOMENTS}
    return UpdateFormats(
        param=param.format if isinstance(param, ScaledTensor) else Format.of(param.dtype),
        exp_avg=formats["exp_avg"],
        exp_avg_sq=formats["exp_avg_sq"],
        param_scaled=isinstance(param, ScaledTensor),
        exp_avg_block=recipe.exp_avg_block if blocked["exp_avg"] else None,
        exp_avg_sq_block=recipe.exp_avg_sq_block if blocked["exp_avg_sq"] else None,
        sqrt_exp_avg_sq=recipe.sqrt_exp_avg_sq and formats["exp_avg_sq"] is not FP32,
        clamp_ratio=recipe.clamp_update,
        stochastic=recipe.rounding == "stochastic",
        decoupled=decoupled,
    )


def _is_blocked(state: dict[str, Tensor], name: str) -> bool:
    """Whether the moment has blocks of scales."""
    scale = state.get(f"{name}_scale")
    return scale is not None and scale.dim() == 1


def describe(recipe: Recipe) -> str:
    """The formats of the moments in words, as kept in a checkpoint: states with other words cannot be continued."""
    words = []
    for name in MOMENTS:
        root = "sqrt of " if name == "exp_avg_sq" and recipe.sqrt_exp_avg_sq else ""
        block = getattr(recipe, f"{name}_block")
        words.append(f"{name} {root}{getattr(recipe, name)}" + (f" in blocks of {block}" if block else ""))
    return ", ".join(words) + (" of all matrices" if recipe.moments_of == "matrices" else "")


@dataclass
class Sealed:
    """A value of a loaded state, hidden from `torch.optim.Optimizer.load_state_dict`, which casts all tensors that it sees."""

    value: Any


def seal(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with sealed state values."""
    state = {number: {k: Sealed(v) for k, v in values.items()} for number, values in state_dict["state"].items()}
    return {**state_dict, "state": state}


def unseal(param: Tensor, sealed: dict[str, Sealed], present: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of `param` from sealed values, each written into the tensor that `present` has for it, if that fits.

    `master_scale` goes to the parameter. No loaded tensor is kept, so two optimizers never share a state.
    """
    state = {}
    for key, value in ((key, seal.value) for key, seal in sealed.items()):
        if key == "master_scale":
            if isinstance(param, ScaledTensor):
                restore_scale(param, value)
            continue
        if key == "step":
            value = torch.as_tensor(value, dtype=torch.float32).reshape(())
        old = present.get(key)
        if old is not None and (old.shape, old.dtype) == (value.shape, value.dtype):
            state[key] = old.copy_(value)
        else:
            state[key] = value.to(param.device, copy=True, memory_format=torch.contiguous_format)
    return state


@torch.no_grad()
def restore_scale(param: ScaledTensor, scale: Tensor) -> None:
    """Give the codes of `param` the scale that they were saved with, if that leaves every real value as it is."""
    scale = scale.to(param.scale)
    real = kernels.uncast(param.codes, param.scale)
    codes = kernels.cast(real, scale, param.codes.dtype)
    if torch.equal(kernels.uncast(codes, scale), real):
        param.codes.copy_(codes)
        param.scale.copy_(scale)
        torch.autograd.graph.increment_version(param)
