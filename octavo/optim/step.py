"""One step of many parameters: what is common to those of a bucket, and the kernels from the scalars to what a step leaves.

All of a step that is not a pass over the parameters is two launches for each device (`kernels.adamw_prepare`, `kernels.adamw_commit`):
the host has little to do but to say where tensors lie. The largest magnitude of a gradient is taken from whoever made it or clipped
it (`known_amax`); only the others are read for it, once more than the pass does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from octavo import kernels
from octavo.kernels import known_amax, remember_amax
from octavo.kernels.reference.adamw import UpdateFormats
from octavo.kernels.reference.magnitudes import Values
from octavo.linear import drop_weight_cache
from octavo.optim.state import Slot


@dataclass
class Bucket:
    """Parameters that are updated together: of one group, device and kind."""

    group: dict[str, Any]
    formats: UpdateFormats
    slots: list[Slot] = field(default_factory=list)


class Plan(NamedTuple):
    """The step of the buckets of one device."""

    buckets: list[Bucket]
    maxima: list[Maxima]
    """Of the slots of all buckets, in order."""
    numbers: list[list[kernels.Numbers]]
    prepared: kernels.Prepared


@dataclass(slots=True)
class Maxima:
    """The largest magnitudes among the codes of a parameter and its moments, kept from the step that stored them."""

    fingerprint: tuple
    """Of the `Slot` then."""
    values: Tensor
    """FP32 [3], written by `kernels.adamw_commit`."""


Known = dict[Tensor, Maxima]
"""By parameter."""


def _maxima(slot: Slot, known: Known) -> Maxima:
    """Those before the step; found anew if anybody else has written into the tensors."""
    fingerprint, maxima = slot.fingerprint, known.get(slot.param)
    if maxima is None or maxima.fingerprint != fingerprint:
        maxima = known[slot.param] = Maxima(fingerprint, torch.stack([kernels.amax(codes) for codes in slot.stored]))
    return maxima


def prepare(buckets: Sequence[Bucket], known: Known) -> list[Plan]:
    """The plan of each device. Nothing changes but what is known of maxima."""
    by_device: dict[torch.device, list[Bucket]] = {}
    for bucket in buckets:
        by_device.setdefault(bucket.slots[0].codes.device, []).append(bucket)
    plans = []
    for alike in by_device.values():
        slots = [slot for bucket in alike for slot in bucket.slots]
        maxima = [_maxima(slot, known) for slot in slots]
        smalls = zip(maxima, _amaxes(slots), strict=True)
        numbers = [
            [
                slot.numbers(bucket.formats, own.values, amax)
                for slot, (own, amax) in zip(bucket.slots, smalls, strict=False)
            ]
            for bucket in alike
        ]
        settings = [
            kernels.UpdateSettings(
                bucket.group["lr"],
                bucket.group["betas"],
                bucket.group["eps"],
                bucket.group["weight_decay"],
                bucket.group["maximize"],
                bucket.group["seed"],
                bucket.slots[0].residual is not None,
                bucket.formats,
            )
            for bucket in alike
        ]
        plans.append(Plan(alike, maxima, numbers, kernels.adamw_prepare(numbers, settings)))
    return plans


def _amaxes(slots: list[Slot]) -> list[Tensor]:
    """The largest magnitudes among the values or codes of the gradients, FP32, 0-d."""
    known = [known_amax(slot.grad) for slot in slots]
    unknown = [slot for slot, amax in zip(slots, known, strict=True) if amax is None]
    found = iter(kernels.magnitudes([Values(slot.grad) for slot in unknown])[0].unbind() if unknown else ())
    return [next(found) if amax is None else amax for amax in known]


def update(plan: Plan, ok: Tensor) -> None:
    """Run the passes of a plan, if `ok` (0-d bool on its device), and store what they leave."""
    for bucket, span in zip(plan.buckets, plan.prepared.spans, strict=True):
        slots, formats = bucket.slots, bucket.formats
        drop_weight_cache(slot.param for slot in slots)
        operands = [slot.operands(formats) for slot in slots]
        scalars, keys, raised = (
            part[span] for part in (plan.prepared.scalars, plan.prepared.keys, plan.prepared.maxima)
        )
        kernels.adamw(operands, scalars, keys, ok, raised, formats)
        for slot, updated in zip(slots, operands, strict=True):
            if updated.param is not slot.codes:  # which is not contiguous
                slot.codes.copy_(updated.param.view(slot.codes.shape))
    kernels.adamw_commit(plan.numbers, plan.prepared, ok)
    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    increment_version([tensor for slot in slots for tensor in (slot.param, slot.codes, slot.exp_avg, slot.exp_avg_sq)])
    for slot, own in zip(slots, plan.maxima, strict=True):
        own.fingerprint = slot.fingerprint
        if slot.scale is not None:  # the layer that casts these codes need not read them for it
            remember_amax(slot.codes, own.values[0])
