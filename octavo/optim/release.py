"""Gradient release: the optimizer steps inside backward, parameter by parameter, so that gradients never live all together.

A hook on each parameter runs as soon as its gradient is whole: clip, update, free. Of the gradients only those of the layer that
backward is at are ever alive, so O2 rests on 5 bytes a parameter instead of 6, and FP32 recipes on 12 instead of 16.

Clipping is the difficulty: the norm N of the whole gradient is known only after the last parameter was to be updated. Two rules:

- "partial" estimates it from the gradients that backward has finished so far. With n_i the norm of parameter i in this step
  and n'_i in the step before, and sums over the parameters finished, the present one included,

      N ≈ N' · √( Σ n_i² / Σ n'_i² )

  A spike of the loss raises all gradients, and shows in the first of them, at the head. The last parameters are clipped by the
  exact norm. The first step, which has no step before, takes the other rule.
- "two_pass" runs backward twice, for the norms and for the updates. It is exact, in every bit the step of `clip_grad_norm_` and
  `AdamW.step`, and costs another backward: two thirds more arithmetic.

What non-finite values do: a loss that is not finite changes nothing; nor does any gradient with "two_pass", which decides before
the first update. With "partial", a gradient that stops being finite half-way through backward, which a finite loss leaves nearly
no room for, cancels its own update and all after it, while the parameters before it, nearer to the head, have made an ordinary step.
Such steps are counted in `partial_steps`. Skipped steps, also these, are in `AdamW.skipped_steps`. Nothing waits for the device.

Parameters may lie on several devices, at work on their default streams: the scalars that all of them share are on one, used by the
backward threads of all, and go to the others without waiting.

A gradient that is gone cannot be added to: no accumulation over micro-batches, no reduction over processes, no loss scale, and no
re-entrant checkpointing of a weight that several segments share, each of which finishes a part of the gradient by itself.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octavo.formats import FP32
from octavo.kernels.untraced import untraced
from octavo.optim.adamw import AdamW
from octavo.optim.clip import clip_factor, gradient_norms, scale_gradient
from octavo.optim.devices import moved

Rule = Literal["partial", "two_pass"]
NORM = "grad_norm"
"""Entry of the optimizer's state: the norm of the parameter's gradient in the last step that was not skipped, FP64, 0-d."""


def release_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None = 1.0, rule: Rule = "partial"
) -> GradientRelease:
    """Have backward update the parameters of `model`; from now on `GradientRelease.step(loss)` is backward and optimizer step.

    Args:
        model: converted or not; call this after `octavo.initialize` or `convert`.
        optimizer: `octavo.AdamW` or `octavo.Adam` over all its trainable parameters.
        max_norm: the norm to clip to; None does not clip.
        rule: where the norm comes from, see `octavo.optim.release`.

    Raises `ValueError`, before anything changes, where it cannot work: another optimizer, parameters without one, gradients
    that wait already, several processes, `nn.DataParallel`, a negative `max_norm`.
    """
    if not isinstance(optimizer, AdamW):
        raise ValueError(
            f"gradient release steps parameters one by one, which {type(optimizer).__name__} cannot: "
            "use octavo.AdamW or octavo.Adam, or the optimizer that octavo.initialize returned"
        )
    if rule not in ("partial", "two_pass"):
        raise ValueError(f"rule is {rule!r}: use 'partial' or 'two_pass'")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}: it must be positive, or None")
    if isinstance(model, nn.DataParallel) or (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError(
            "gradient release frees each gradient before it could be reduced over processes or devices: train on one GPU, or without it"
        )
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in stepped:
            raise ValueError(
                f"{name} is trainable, but not in the optimizer: nobody would free its gradient; freeze it, or add it"
            )
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    release = GradientRelease(optimizer, max_norm, rule, names)
    release.check_no_gradients()
    release.attach()
    return release


class GradientRelease:
    """Backward that updates; made by `release_gradients`."""

    def __init__(self, optimizer: AdamW, max_norm: float | None, rule: Rule, names: dict[Tensor, str]) -> None:
        self.optimizer, self.max_norm, self.rule = optimizer, max_norm, rule
        self._names = names
        device = optimizer.skipped_steps.device
        self.partial_steps = torch.zeros((), dtype=torch.int64, device=device)
        """Skipped steps in which some parameters had been updated already; 0-d, on the device."""
        self._handles: list[Any] = []
        self._pass: Literal["none", "measure", "update"] = "none"
        self._skip: Tensor | None = None
        self._lock = threading.Lock()
        """Backward has a thread for each device, and all of them update the shared scalars."""

    def attach(self) -> None:
        """Register the hooks."""
        for _, param, _ in self._places():
            # Also on frozen parameters, which may be unfrozen.
            requires_grad = param.requires_grad
            self._handles.append(param.requires_grad_(True).register_post_accumulate_grad_hook(self._finished))
            param.requires_grad_(requires_grad)
        self._handles.append(self.optimizer.register_step_pre_hook(self._count_skip))

    def remove(self) -> None:
        """Undo `release_gradients`: gradients stay, and the optimizer's own step uses them."""
        while self._handles:
            self._handles.pop().remove()

    def check_no_gradients(self) -> None:
        """Raises `ValueError` if a parameter has a gradient already."""
        for _, param, _ in self._places():
            if param.grad is not None:
                raise ValueError(
                    f"{self._describe(param)} has a gradient already, and a step that releases gradients cannot add to it: "
                    "call optimizer.zero_grad(), and use one micro-batch a step"
                )

    def _check_hooks(self) -> None:
        """Raises `RuntimeError` if a trainable parameter has lost its hook, or has come to the optimizer without one."""
        for _, param, _ in self._places():
            hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if param.requires_grad and (hooks is None or self._finished not in hooks.values()):
                raise RuntimeError(
                    f"{self._describe(param)} is without the hook that updates it, which something has removed, or it came to the "
                    "optimizer later: call remove() on this gradient release, and release_gradients again"
                )

    def _describe(self, param: Tensor) -> str:
        return f"{self._names.get(param, 'a parameter')} {tuple(param.shape)}"

    def step(self, loss: Tensor) -> Tensor:
        """Backward of `loss` (one element), in which every parameter is updated; returns the norm of the gradient, FP64, 0-d.

        Ends with the (now empty) step of the optimizer, for the hooks and schedulers that wait for it. Raises `ValueError` if
        gradients wait from before, and `RuntimeError` if a parameter has lost its hook, both before anything runs. Raises
        `RuntimeError` if backward finishes the gradient of a parameter in parts: a pass for the norms does so before anything
        changes; without one ("partial" after its first step, or without clipping) the first part has been applied by then.
        A backward that raises leaves no gradients.
        """
        if not self._handles:
            raise RuntimeError("this gradient release was removed: call loss.backward() and optimizer.step()")
        self._check_hooks()
        self.check_no_gradients()
        self._place = {param: (group, offset) for group, param, offset in self._places()}
        # Not the CPU, if any parameter is elsewhere: that would have to wait for the device.
        self._device = next((param.device for param in self._place if param.device.type != "cpu"), torch.device("cpu"))
        self._norms: dict[Tensor, Tensor] = {}
        self._factor: Tensor | None = None
        self._ok = moved(loss.detach().isfinite().reshape(()), self._device)
        self._begun: Tensor | None = None
        states = [self.optimizer.state.get(param, {}) for param in self._place]
        before = [moved(state[NORM], self._device) for state in states if NORM in state]
        if self.rule == "two_pass" or (self.max_norm is not None and not before):
            self._backward(loss, "measure")
            norm = self._norm()
            self._factor = clip_factor(norm, math.inf if self.max_norm is None else self.max_norm)
            # Squares of the clipped gradient must be FP32 numbers, or the optimizer would refuse them one by one.
            self._ok = self._ok & ((norm * self._factor) ** 2 < FP32.max)
            self._norms = {}
        elif self.max_norm is not None:
            self._total = torch.stack(before).square().sum()
            self._seen = self._seen_before = torch.zeros_like(self._total)
        self._backward(loss, "update")
        norm = self._norm()
        self._remember()
        self._skip = self._ok.logical_not()
        if self._begun is not None:
            self.partial_steps = moved(self.partial_steps, self._device) + (self._begun & self._skip)
        self.optimizer.step()
        return norm

    def _places(self) -> list[tuple[dict[str, Any], Tensor, int]]:
        """(group, parameter, index of its first element among all) in the order of the optimizer."""
        places, offset = [], 0
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                places.append((group, param, offset))
                offset += param.numel()
        return places

    def _backward(self, loss: Tensor, which: Literal["measure", "update"]) -> None:
        self._pass = which
        try:
            loss.backward(retain_graph=which == "measure")
        except BaseException:
            self.optimizer.zero_grad()  # parts of a gradient that will never be whole
            raise
        finally:
            self._pass = "none"

    @torch.no_grad()
    @untraced
    def _finished(self, param: Tensor) -> None:
        """Hook: the gradient of `param` is whole."""
        grad = param.grad
        assert grad is not None
        if self._pass == "none":
            raise RuntimeError(
                "gradients of this model are released: call GradientRelease.step(loss) instead of loss.backward()"
            )
        if param not in self._place:
            raise RuntimeError(f"{self._describe(param)} has left the optimizer: remove() the gradient release first")
        with self._lock:
            if param in self._norms:
                updated = ", after the first has updated it (go on from a checkpoint)" if self._pass == "update" else ""
                raise RuntimeError(
                    f"{self._describe(param)} got a second gradient in one backward pass{updated}: "
                    "use torch.utils.checkpoint with use_reentrant=False"
                )
            norm = self._norms[param] = gradient_norms([grad])[0][0]
            if self._pass == "update":
                self._update(param, grad, norm)
        param.grad = None

    def _update(self, param: Tensor, grad: Tensor, norm: Tensor) -> None:
        """Clip `grad`, and update `param` by it."""
        norm = moved(norm, self._device)
        self._ok = self._ok & norm.isfinite()
        if self.max_norm is not None:
            factor = self._factor if self._factor is not None else self._partial(param, norm)
            scale_gradient(grad, moved(factor, param.device), positive=True)
        group, offset = self._place[param]
        ok = self.optimizer.update_parameter(group, param, offset, moved(self._ok, param.device))
        self._ok = moved(ok, self._device)
        if self._begun is None:
            self._begun = self._ok

    def _partial(self, param: Tensor, norm: Tensor) -> Tensor:
        """The factor for `param` by the rule "partial"."""
        assert self.max_norm is not None
        before = moved(self.optimizer.state[param].get(NORM, torch.zeros_like(norm)), self._device)
        self._seen = self._seen + norm**2
        self._seen_before = self._seen_before + before**2
        known = self._seen_before > 0
        total = torch.where(known, self._total * self._seen / self._seen_before, self._total + self._seen)
        return clip_factor(total.sqrt(), self.max_norm)

    def _norm(self) -> Tensor:
        """The norm of the whole gradient, as `clip_grad_norm_` computes it."""
        norms = [moved(self._norms[param], self._device) for param in self._place if param in self._norms]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def _remember(self) -> None:
        for param, norm in self._norms.items():
            state = self.optimizer.state[param]
            state[NORM] = torch.where(moved(self._ok, norm.device), norm, state.get(NORM, torch.zeros_like(norm)))

    def _count_skip(self, *_: Any) -> None:
        """Hook before the optimizer's step, after those that compare `skipped_steps` before and after it."""
        if self._skip is not None:
            self.optimizer.skipped_steps = moved(self.optimizer.skipped_steps, self._device) + self._skip
            self._skip = None
