"""`FP8Linear`: a linear layer whose three GEMMs run in FP8, made from an existing layer by changing its class.

The module object stays: its name, hooks, training flag and references to it survive, and so does every attribute. What a
layer adds is its recipe, hints of its scales and, with delayed scaling, two windows of past maxima. None of them is a buffer: `.half()`
must not round them, and nobody has to save or send a hint. `state_dict` speaks plain FP32 tensors under the names of the unconverted
layer, and takes such back.

An input that several layers read (q, k and v; gate and up) is cast once: its operand hangs on the input tensor itself, and all
layers save the same FP8 copy for backward. Delayed scaling gives each layer its own scale, and so its own copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from octavo.formats import Format
from octavo.kernels import streams
from octavo.linear import tracing
from octavo.linear.gemm import Gemms, LinearFunction
from octavo.linear.operand import (
    Hints,
    Operand,
    cast_operand,
    drop_weight_cache,
    scaled_gradient,
    stays,
    weight_operand,
)
from octavo.linear.storage import is_watched, replace_parameter, unwatch_gradient, user_state_kept, watch_gradient
from octavo.recipe import Recipe
from octavo.scaling import DelayedScaling, update_all
from octavo.tensor import ScaledTensor, cast, uncast

SCALINGS = ("input_scaling", "grad_output_scaling")


class FP8Linear(nn.Linear):
    """y = x · wᵀ + bias with FP8 operands, for x [..., in_features] with any number of leading dims and tokens, also zero.

    Made by `octavo.convert`, never built directly. The output has the autocast dtype if autocast is on, else that of `x`.
    Raises `ValueError` if the last dim of `x` is not `in_features` or `x` is not floating.
    """

    input_first = False
    """Whether the weight is stored [in_features, out_features]."""

    recipe: Recipe
    plain_class: type[nn.Module]
    """What `octavo.export` turns the layer back into."""
    exclusive: bool
    """Whether only converted layers read the weight; if not, it and its gradient stay plain."""
    stats: dict[str, Tensor] | None
    """Counts of casts while `collect_stats` is active."""
    input_scaling: DelayedScaling | None
    grad_output_scaling: DelayedScaling | None
    hints: Hints
    """On the device of the weight."""

    @classmethod
    def adopt(cls, module: nn.Module, recipe: Recipe, exclusive: bool) -> None:
        """Make `module` a layer of this class. Its weight is stored as it is; `store` changes that."""
        plain_class = type(module)
        module.__class__ = cls
        assert isinstance(module, FP8Linear)
        module.recipe, module.plain_class, module.exclusive, module.stats = recipe, plain_class, exclusive, None
        module.input_scaling = module.grad_output_scaling = None
        module.hints = Hints.on(module.weight.device)
        module.reset_scaling()
        module.watch_gradient()

    def release(self) -> None:
        """Undo `adopt` and `store`: the weight and its gradient become plain tensors of the logical dtype."""
        drop_weight_cache([self.weight])
        unwatch_gradient(self.weight)
        tracing.layers.discard(self)
        replace_parameter(self.weight, uncast(self.weight.detach()), self.weight.grad)
        self.__class__ = self.plain_class  # type: ignore[assignment]
        for name in ("recipe", "plain_class", "exclusive", "stats", "input_scaling", "grad_output_scaling", "hints"):
            delattr(self, name)

    @property
    def master(self) -> Format | None:
        """Storage of the weight; None if it is plain."""
        return self.recipe.master if self.exclusive else None

    @property
    def gradient_format(self) -> Format | None:
        """Storage of the gradient of the weight; None if it is plain."""
        return self.recipe.grad if self.exclusive else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # once: a parametrization computes it anew, and without gradient under `no_grad`
        recipe = self.recipe
        shape, first, training, stats = x.shape, self.input_first, self.training, self.stats
        k = weight.shape[0 if first else 1]
        if not shape or shape[-1] != k or not x.is_floating_point():
            raise ValueError(f"the layer takes floating [..., {k}], but the input is {x.dtype} {tuple(shape)}")
        backward, compiling = torch.is_grad_enabled(), is_compiling()
        if not compiling:
            if not is_watched(weight):
                self.watch_gradient()
        elif training and backward and x.numel():
            for _, scaling in self.scalings():  # a compiled backward can write maxima, and cannot note that it has
                scaling.expect_record()
        flat, device = x if len(shape) == 2 else x.reshape(-1, k), x.device.type
        gemms = Gemms(
            recipe,
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype,
            first,
            self.exclusive and recipe.grad is not None,
            self.hints,
            self.grad_output_scaling if training else None,
            stats,
        )
        assert recipe.weight is not None
        x_operand = self._input_operand(x, flat, backward and weight.requires_grad, backward, compiling)
        # With the half that dgrad reads, if that can stay until then.
        dgrad = backward and x.requires_grad and stays(x)
        w_operand = weight_operand(
            weight,
            recipe.weight,
            power_of_two=recipe.power_of_two,
            row=dgrad or not first,
            col=dgrad or first,
            stats=None if stats is None else stats["weight"],
        )
        y = LinearFunction.apply(flat, weight, self.bias, x_operand, w_operand, gemms)
        return y if flat is x else y.reshape(*shape[:-1], weight.shape[1 if first else 0])

    def _input_operand(self, x: Tensor, flat: Tensor, wgrad: bool, record: bool, compiling: bool) -> Operand:
        """The operand of the input; its transpose only for wgrad. Only a forward with gradients counts for later scales."""
        fmt, power_of_two = self.recipe.input, self.recipe.power_of_two
        assert fmt is not None
        scaling = self.input_scaling if self.training else None
        stats = None if self.stats is None else self.stats["input"]
        # Only an activation is shared: autograd made it, so nobody keeps it as a buffer and refills it behind our back.
        shared = not compiling and scaling is None and stats is None and x.grad_fn is not None
        if shared:
            # A captured graph shares what it casts itself; nothing comes from outside of it or goes there (see `kernels.streams`).
            tag = (x._version, streams.place(x), fmt, power_of_two)
            cached = getattr(x, "_octavo_cast", None)
            if cached is not None and cached[0] == tag and not (wgrad and cached[1].codes_t is None):
                return cached[1]
        operand = cast_operand(
            flat,
            fmt,
            power_of_two=power_of_two,
            col=wgrad,
            scaling=scaling,
            record=record,
            stats=stats,
            hint=self.hints.input,
        )
        if shared:
            x._octavo_cast = (tag, operand)  # type: ignore[attr-defined]
        return operand

    # --- storage of the weight and of its gradient

    def store(self) -> None:
        """Put the weight, if it is plain, and its gradient into the formats of the recipe, in place."""
        weight, grad = self.weight, self.weight.grad
        if self.gradient_format is not None and grad is not None and not isinstance(grad, ScaledTensor):
            grad = scaled_gradient(grad, weight.dtype)
        if self.master is not None and not isinstance(weight, ScaledTensor):
            replace_parameter(weight, cast(weight.detach(), self.master), grad)
        weight.grad = grad
        self.watch_gradient()

    def watch_gradient(self) -> None:
        """See to it that autograd leaves the gradient of the weight in FP8; wanted again for a new parameter or new memory."""
        if self.gradient_format is not None:
            watch_gradient(self.weight)
            tracing.layers.add(self)

    # --- delayed scaling

    def scalings(self) -> list[tuple[str, DelayedScaling]]:
        """The delayed scalings of the layer by name; none with current scaling."""
        return [(name, getattr(self, name)) for name in SCALINGS if getattr(self, name) is not None]

    def reset_scaling(self) -> None:
        """Forget all past maxima: the next steps scale each tensor by itself."""
        if self.recipe.scaling == "delayed":
            self.input_scaling, self.grad_output_scaling = DelayedScaling(), DelayedScaling()
        self._move_scaling()

    def _move_scaling(self) -> None:
        """Past maxima and hints are on the device of the weight before they are wanted: for a captured graph, and so that maxima of all
        layers can stay together."""
        device = self.weight.device
        if device.type != "meta":
            for _, scaling in self.scalings():
                scaling.to(device)
            if self.hints.input.device != device:
                self.hints = Hints.on(device)

    def update_scaling(self) -> None:
        """Let the maxima of a step enter the windows; once for each optimizer step."""
        update_all([scaling for _, scaling in self.scalings()])

    # --- what nn.Module does with a layer

    def train(self, mode: bool = True) -> FP8Linear:
        if mode != self.training:  # evaluation often swaps averaged weights in, through `.data`
            drop_weight_cache([self.weight])
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> FP8Linear:
        drop_weight_cache([self.weight])
        with user_state_kept(self.weight):
            super()._apply(fn, recurse)
        self.watch_gradient()
        self._move_scaling()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.weight, ScaledTensor) and not keep_vars:
            # FP32 holds FP16 codes with a power-of-two scale exactly; the logical dtype, say BF16, would not.
            destination[f"{prefix}weight"] = uncast(self.weight.detach(), torch.float32)
        for name, scaling in self.scalings():
            destination.update({f"{prefix}{name}.{key}": value for key, value in scaling.state_dict().items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        drop_weight_cache([self.weight])
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.store()  # with assign=True the weight is now a plain tensor
        # Past maxima belong to the weights of their time: without those of the loaded ones, begin again.
        self.reset_scaling()
        for name, scaling in self.scalings():
            start = f"{prefix}{name}."
            state = {key.removeprefix(start): value for key, value in state_dict.items() if key.startswith(start)}
            if state:
                scaling.load_state_dict(state)
        unexpected_keys = args[3]
        ours = tuple(f"{prefix}{name}." for name in SCALINGS)
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith(ours)]

    def __getstate__(self) -> dict[str, Any]:
        drop_weight_cache([self.weight])
        return {**self.__dict__, "stats": None, "hints": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.hints = Hints.on(self.weight.device)
        self.watch_gradient()  # a copied parameter has no hooks

    def extra_repr(self) -> str:
        k, n = self.weight.shape if self.input_first else self.weight.shape[::-1]
        master = self.weight.dtype if self.master is None else self.master.name
        return f"{k}, {n}, bias={self.bias is not None}, recipe={self.recipe.name}, master={master}"


class FP8Conv1D(FP8Linear):
    """The `Conv1D` of Hugging Face's GPT-2: a linear layer whose weight is stored [in_features, out_features]."""

    input_first = True
