"""AdamW with precision decoupled: FP8 gradients and first moment, FP16 second moment and master, all arithmetic in FP32.

A converted parameter (a `ScaledTensor`) is its own master: there is no second copy of the weights. Per parameter of O2 that is
2 (FP16 + scale) + 1 (E4M3 gradient) + 1 (E4M3 first moment in blocks) + 2 (FP16 √v) = 6 B, where the usual mixed precision holds 16
(Eq. 8 and 7 of FP8-LM). Every other parameter keeps FP32 moments, unless the recipe wants those of all matrices small.

A step reads and writes each parameter once (`kernels.adamw`). Around these passes stand two kernels on 0-d tensors
(`octavo.optim.step`), and the host never waits for the device. Rounding is stochastic unless the recipe says otherwise: to
nearest, every update below half a step of the format is lost, which at a fine-tuning learning rate is most of them.

A step in which any gradient is not finite, or has a square that is not, changes nothing in any parameter, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.reference.adamw import UpdateFormats
from octavo.optim.checks import check_group, check_loadable, warn_of_lost_updates
from octavo.optim.devices import moved
from octavo.optim.state import Slot, describe, gradient, initial_state, seal, unseal, update_formats
from octavo.optim.step import Bucket, Known, prepare, update
from octavo.recipe import Recipe, get_recipe
from octavo.tensor import ScaledTensor


class AdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) for converted and plain parameters alike.

    p = p - lr·(m̂/(√v̂ + eps) + weight_decay·p), with bias-corrected moments, and m̂/√v̂ cut to the bound that exact Adam obeys.

    Args:
        params: parameters, named parameters or groups of them: FP32, BF16, FP16 or `ScaledTensor`.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`; lr may be a 0-d tensor.
        recipe: formats of the moments and whose they are (`Recipe.moments_of`), and the rounding of everything.
        seed: of stochastic rounding, together with the step and the position of an element among all elements.

    Raises `ValueError` for hyper-parameters out of range, parameters of other dtypes, and sparse gradients.

    `state_dict` holds plain tensors (`octavo.optim.state`), and `load_state_dict` continues the run bit for bit.
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        recipe: str | Recipe = "O2",
        seed: int = 0,
    ) -> None:
        self.recipe = get_recipe(recipe)
        self._formats: dict[tuple, UpdateFormats] = {}
        self._maxima: Known = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "seed": seed,
            "state_formats": describe(self.recipe),
        }
        super().__init__(params, defaults)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=self.param_groups[0]["params"][0].device)
        """Number of steps that non-finite gradients made void; 0-d, on the device, so reading it waits for the device."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking it: see `torch.optim.Optimizer.add_param_group`."""
        if not isinstance(param_group["params"], (Tensor, set)):
            param_group["params"] = list(param_group["params"])
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the result of `closure`, which is called first, if given."""
        if (
            torch.compiler.is_compiling()
        ):  # not a decorator: that would import the compiler with octavo, and it changes globals
            return torch.compiler.disable(self._step)(closure)
        return self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = self._buckets()
        if not buckets:
            return loss
        plans = prepare(buckets, self._maxima)
        ok = plans[0].prepared.ok
        for plan in plans[1:]:
            ok = ok & moved(plan.prepared.ok, ok.device)
        for plan in plans:
            update(plan, moved(ok, plan.prepared.ok.device))
        self.skipped_steps = self.skipped_steps.to(ok.device) + ~ok
        return loss

    def _buckets(self) -> list[Bucket]:
        """All parameters with a gradient. Every gradient is checked before anything changes."""
        offset, found = 0, []
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    found.append((number, param, gradient(param), offset))
                offset += param.numel()
        buckets: dict[tuple, Bucket] = {}
        for number, param, parts, offset in found:
            formats, slot = self._slot(param, parts, offset)
            key = (number, slot.codes.get_device(), id(formats), slot.residual is not None)
            buckets.setdefault(key, Bucket(self.param_groups[number], formats)).slots.append(slot)
        return list(buckets.values())

    def _slot(
        self, param: Tensor, grad: tuple[Tensor, Tensor | None, Tensor | None], offset: int
    ) -> tuple[UpdateFormats, Slot]:
        """What a step needs of `param` and its gradient; a new parameter gets its state here."""
        state = self.state[param]
        if "step" not in state:
            state.update(initial_state(param, self.recipe))
        codes, scale = (param.codes, param.scale) if isinstance(param, ScaledTensor) else (param.detach(), None)
        moments = state["exp_avg"], state["exp_avg_sq"], state.get("exp_avg_scale"), state.get("exp_avg_sq_scale")
        slot = Slot(param, codes, scale, *grad, offset, state["step"], *moments)
        kind = slot.kind
        formats = self._formats.get(kind)
        if formats is None:
            formats = self._formats[kind] = update_formats(param, state, self.recipe, self._decoupled)
        return formats, slot

    @torch.no_grad()
    def update_parameter(self, group: dict[str, Any], param: Tensor, offset: int, ok: Tensor) -> Tensor:
        """The step of one parameter of `group` alone, `offset` elements into the optimizer; for gradient release.

        Nothing changes if `ok` (0-d bool) is false or the gradient cannot be used; returns whether the parameter was updated.
        """
        formats, slot = self._slot(param, gradient(param), offset)
        (plan,) = prepare([Bucket(group, formats, [slot])], self._maxima)
        ok = moved(ok, plan.prepared.ok.device) & plan.prepared.ok
        update(plan, ok)
        return ok

    def check_numerics(self) -> None:
        """Warn of every group whose learning rate is too small to move its weights: see `octavo.optim.checks`."""
        for number, group in enumerate(self.param_groups):
            warn_of_lost_updates(number, group, self.recipe)

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`, plain tensors only, with `master_scale` for each `ScaledTensor` parameter.

        The scale lets `load_state_dict` give the parameter the codes that it had, after the model was loaded from real values.
        """
        result = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in result["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in result["state"] and isinstance(param, ScaledTensor):
                result["state"][number] = {**result["state"][number], "master_scale": param.scale}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, every tensor in the dtype in which it was saved, into the tensors of the present state where they fit.

        States of `torch.optim.AdamW` are accepted and go on in FP32. Load the model first: its weights get back their scales here.
        Raises `ValueError`, before anything changes, if the state was saved with other formats.
        """
        check_loadable(state_dict, self.recipe)
        present = self.state

        def after(_: torch.optim.Optimizer) -> None:
            for group in self.param_groups:
                for key in ("seed", "state_formats"):  # what torch.optim does not have
                    group.setdefault(key, self.defaults[key])
            for param, sealed in self.state.items():
                self.state[param] = unseal(param, sealed, present.get(param, {}))

        # The hooks of the user see the state as it was saved, and as it was loaded.
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, loaded: seal(loaded)),
            self.register_load_state_dict_post_hook(after, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "recipe": self.recipe, "skipped_steps": self.skipped_steps}  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._formats, self._maxima = {}, {}


class Adam(AdamW):
    """Adam with L2 regularisation: as `AdamW`, but weight_decay·p is added to the gradient, as in `torch.optim.Adam`."""

    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        recipe: str | Recipe = "O2",
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, recipe=recipe, seed=seed)
