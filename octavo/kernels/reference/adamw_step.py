"""What stands around the passes of an AdamW step: everything 0-d, before them and after them, each for all parameters at once.

A step needs twelve scalars, three new scales and a key of each parameter, in FP64, from seven values that lie each in a tensor of its
own; and leaves a step count, scales and maxima in such tensors. As operations of PyTorch that is some sixty launches and as many
lists of tensors, 4 ms of the host for 32 parameters. Here it is two launches, which read and write the tensors where they are.

A step either happens to all parameters or to none. So `adamw_prepare` looks at all gradients, and changes nothing that lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.reference.adamw import UpdateFormats
from octavo.kernels.reference.adamw_scalars import adamw_scalars
from octavo.kernels.reference.random import make_key


class Numbers(NamedTuple):
    """The small tensors of one parameter: FP32, 0-d but for `maxima`."""

    step: Tensor
    """Steps done."""
    param_scale: Tensor | None
    """Scales of the stored codes; None where there is none, or one for each block."""
    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None
    maxima: Tensor
    """[3], the largest magnitudes among the codes of param, exp_avg and exp_avg_sq."""
    grad_scale: Tensor | None
    """That of E4M3 codes."""
    grad_amax: Tensor
    """The largest magnitude among the values or codes of the gradient."""

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of param, exp_avg and exp_avg_sq."""
        return self[1:4]


class UpdateSettings(NamedTuple):
    """What the parameters of a bucket have in common."""

    lr: float | Tensor
    """A number, or one element."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool
    seed: int
    residual: bool
    """Whether the gradients have a residual byte."""
    formats: UpdateFormats


class Prepared(NamedTuple):
    """The scalars of a step; of each tensor the rows `spans[i]` belong to the parameters of bucket i, in their order."""

    scalars: Tensor
    """FP32 [rows, fields of `Scalars`]."""
    keys: Tensor
    """int32 [rows], see `octavo.kernels.reference.random`."""
    scales: Tensor
    """FP32 [rows, 3], new ones of param, exp_avg and exp_avg_sq."""
    maxima: Tensor
    """FP32 [rows, 3], zero: to be raised by `adamw`."""
    ok: Tensor
    """Bool, 0-d: whether the step can happen."""
    spans: list[slice]
    table: Tensor | None = None
    """Where the kernel of `adamw_commit` finds the tensors, on their device."""


def adamw_prepare(numbers: Sequence[Sequence[Numbers]], settings: Sequence[UpdateSettings]) -> Prepared:
    """Scalars, new scales, keys and verdict of a step: see `adamw_scalars`.

    `numbers` of the parameters by bucket, none empty, all on one device, and the `settings` of each bucket.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    ok, spans, first = None, [], 0
    for bucket, (lr, betas, eps, weight_decay, maximize, seed, residual, formats) in zip(
        numbers, settings, strict=True
    ):
        device = bucket[0].step.device
        one = torch.ones((), device=device)
        step = torch.stack([own.step for own in bucket]) + 1
        scales = torch.stack([one if scale is None else scale for own in bucket for scale in own.scales]).view(-1, 3)
        columns, new_scales, usable = adamw_scalars(
            step,
            scales,
            torch.stack([own.maxima for own in bucket]),
            torch.stack([one if own.grad_scale is None else own.grad_scale for own in bucket]),
            torch.stack([own.grad_amax for own in bucket]),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            residual=residual,
            formats=formats,
        )
        parts.append((torch.stack(columns, 1), make_key(seed, step, 0, device), torch.stack(new_scales, 1)))
        ok = usable if ok is None else ok & usable
        spans.append(slice(first, first := first + len(bucket)))
    assert ok is not None
    scalars, keys, new = (torch.cat(column) for column in zip(*parts, strict=True))
    return Prepared(scalars, keys, new, torch.zeros_like(new), ok, spans)


def adamw_commit(numbers: Sequence[Sequence[Numbers]], prepared: Prepared, ok: Tensor) -> None:
    """Where `ok` (0-d bool): counts the step, and stores the new scales and maxima of `prepared`; otherwise nothing changes."""
    rows = [row for span in prepared.spans for row in range(span.start, span.stop)]
    for own, row in zip((own for bucket in numbers for own in bucket), rows, strict=True):
        own.step.add_(ok)
        own.maxima.copy_(torch.where(ok, prepared.maxima[row], own.maxima))
        for which, scale in enumerate(own.scales):
            if scale is not None:
                scale.copy_(torch.where(ok, prepared.scales[row, which], scale))
