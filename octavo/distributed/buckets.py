"""Which gradients travel together, and how a bucket of them is reduced.

Buckets follow the reverse order of the parameters, which is about the order in which backward makes their gradients. The order is a
function of the model alone, not of what a first step happened to do, so that a resumed run has the buckets of the run that it
continues. Converted weights, whose gradients are FP8, and plain parameters of each dtype have buckets of their own kind.

Reducing works on gradients that backward has left for good, in place, and never waits for the device: on a side stream with
CUDA, in a thread of its own elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from octavo import kernels
from octavo.distributed.algorithms import SCALES, Algorithm, plain_mean
from octavo.distributed.autoscale import AutoScale
from octavo.distributed.collectives import Ranks
from octavo.distributed.layout import ROW, Layout
from octavo.distributed.samples import Sampler
from octavo.distributed.scales import ABSENT
from octavo.formats import E4M3
from octavo.kernels import streams
from octavo.linear import scaled_gradient
from octavo.linear.storage import is_watched, store_gradient
from octavo.tensor import ScaledTensor


@dataclass(frozen=True)
class Member:
    """A parameter in a bucket."""

    name: str
    param: Tensor
    scaled: int | None
    """Its number among the parameters with FP8 gradients, or None."""


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together, and where the current backward pass stands."""

    members: list[Member]
    layout: Layout
    index: Tensor
    """Numbers of the members among all parameters with FP8 gradients, int64 [members]; empty for plain ones."""
    waiting: set[int] = field(default_factory=set)
    """Positions of members whose gradients are not there yet."""
    grads: list[Tensor] = field(default_factory=list)
    """The gradients that are being reduced: those of the parameters, or new ones where a parameter has none."""
    absent: list[bool] = field(default_factory=list)
    """Whether the gradient is such a new one."""
    kept: list[Tensor] = field(default_factory=list)
    """Memory that the reduction may still read."""
    present: Tensor | None = None
    """Bool [members]: whether any rank has the gradient; known once it is reduced, if a gradient is absent here."""
    finite: Tensor | None = None
    """Bool, 0-d: whether all gradients were finite on all ranks."""

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients are FP8."""
        return self.members[0].scaled is not None

    @property
    def scaled_grads(self) -> list[ScaledTensor]:
        """`grads`, where they are FP8."""
        return cast(list[ScaledTensor], self.grads)

    def start(self) -> None:
        """Expect the gradients of a backward pass."""
        self.waiting, self.grads, self.absent, self.present = set(range(len(self.members))), [], [], None

    def take(self) -> None:
        """Take hold of the gradients: from now on they are written by the reduction only."""
        self.absent = [member.param.grad is None for member in self.members]
        for position, (member, absent) in enumerate(zip(self.members, self.absent, strict=True)):
            if absent and position not in self.waiting:
                raise ValueError(
                    f"the gradient of {member.name} was freed before the ranks could average it: release of gradients in backward "
                    "works on one rank only"
                )
        self.grads = [self._gradient(member) for member in self.members]

    def _gradient(self, member: Member) -> Tensor:
        param, grad = member.param, member.param.grad
        if grad is None and member.scaled is None:
            return torch.zeros(param.shape, dtype=param.dtype, device=param.device)
        if grad is None:
            codes = torch.zeros(param.shape, dtype=E4M3.dtype, device=param.device)
            return ScaledTensor(codes, torch.ones((), device=param.device), param.dtype, residual_on_add=True)
        if grad.layout is not torch.strided:
            raise ValueError(f"the gradient of {member.name} is sparse: use Embedding(..., sparse=False)")
        if member.scaled is not None:  # plain where its user has assigned it, and this backward has not added to it
            store_gradient(param)
            return cast(Tensor, param.grad)
        if isinstance(grad, ScaledTensor) or is_watched(param):
            raise ValueError(
                f"the gradient of {member.name} has changed its kind since the model was wrapped: convert the model before wrapping it"
            )
        return grad

    def drop_residuals(self) -> None:
        """The gradients are codes alone again. The memory of the residuals is kept until `give`: another stream may still read it."""
        for grad in self.scaled_grads:
            if grad._storage.residual is not None:
                self.kept.append(grad._storage.residual)
            grad._storage.residual = None
            grad._storage.mark_written()

    def give(self) -> None:
        """Give gradients to parameters that had none here and have one elsewhere. Only then the host waits for the device."""
        if any(self.absent):
            assert self.present is not None
            if streams.place(self.present) == streams.CAPTURED:
                raise RuntimeError(
                    f"{self.members[self.absent.index(True)].name} has no gradient here, and a CUDA graph cannot ask whether another rank "
                    "has one: freeze it, or train without a graph"
                )
            for member, grad, absent, present in zip(
                self.members, self.grads, self.absent, self.present.tolist(), strict=True
            ):
                if absent and present:
                    member.param.grad = grad
        self.grads, self.kept, self.present = [], [], None


def assign(members: Sequence[Member], world: int, bucket_bytes: int) -> list[Bucket]:
    """Buckets of at least `bucket_bytes` on the wire, but for the last of each kind, in the order in which they fill."""
    filling: dict[tuple, tuple[list[Member], int]] = {}
    groups: list[list[Member]] = []
    for member in reversed(members):
        param, scaled = member.param, member.scaled is not None
        key = (param.device, None if scaled else param.dtype)
        group, size = filling.pop(key, ([], 0))
        group.append(member)
        size += param.numel() * (1 if scaled else param.element_size())
        if size >= bucket_bytes:
            groups.append(group)
        else:
            filling[key] = (group, size)
    groups += [group for group, _ in filling.values()]
    return [_bucket(group, world) for group in groups]


def _bucket(members: list[Member], world: int) -> Bucket:
    device = members[0].param.device
    scaled = [member.scaled for member in members if member.scaled is not None]
    index = torch.tensor(scaled, dtype=torch.int64, device=device)
    return Bucket(members, Layout([member.param.shape for member in members], world, device), index)


class Reduction:
    """How gradients are reduced: `reduce(bucket)` makes them the mean over all ranks, in place."""

    def __init__(self, ranks: Ranks, algorithm: str, fp8: Algorithm | None, autoscale: AutoScale) -> None:
        self.ranks, self.algorithm, self.autoscale = ranks, algorithm, autoscale
        self._fp8 = fp8
        self.sampler: Sampler | None = None
        """Measures what is lost while it is set."""

    @torch.no_grad()
    def reduce(self, bucket: Bucket) -> None:
        """Reduce the gradients that the bucket has taken."""
        if not bucket.is_scaled:
            self._plain(bucket)
        elif self._fp8 is None:
            self._dequantised(bucket)
        else:
            self._scaled(bucket, self._fp8)

    def _scaled(self, bucket: Bucket, algorithm: Algorithm) -> None:
        """FP8 all the way: Eqs. 3-6."""
        layout, grads = bucket.layout, bucket.scaled_grads
        gradients = kernels.Gradients(
            [grad.codes for grad in grads],
            [grad.residual for grad in grads],
            [grad.scale for grad in grads],
            bucket.absent,
            layout.places,
        )
        minimum = kernels.local_scales(gradients)
        self.ranks.all_reduce(minimum, dist.ReduceOp.MIN, SCALES)
        mu = self.autoscale.current(bucket.index)
        codes = kernels.pack_codes(gradients, minimum, mu)
        sample = None if self.sampler is None else self.sampler.compare(gradients, codes, layout)
        gain = algorithm(codes, layout, self.ranks)
        bucket.finite, usable, largest = kernels.unpack_codes(
            gradients, codes, minimum, mu, gain, self.ranks.world, self.autoscale.fp8_sums
        )
        ratio = None
        if largest is not None:
            ratio = largest / layout.numel.clamp(min=1)
            self.autoscale.update(bucket.index, ratio, usable)
        if self.sampler is not None and sample is not None:
            names = [member.name for member in bucket.members]
            self.sampler.add(names, layout, sample, gradients, ratio)
        bucket.drop_residuals()
        bucket.present = minimum < ABSENT if any(bucket.absent) else None

    def _plain(self, bucket: Bucket) -> None:
        """Real values in their own format, or in the one that the algorithm names."""
        grads = bucket.grads
        wire = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(self.algorithm, grads[0].dtype)
        torch._foreach_copy_(grads, self._mean(bucket, grads, wire))

    def _dequantised(self, bucket: Bucket) -> None:
        """FP8 gradients that travel as BF16 or FP32 and are cast again."""
        wire = torch.bfloat16 if self.algorithm == "bf16" else torch.float32
        grads = bucket.scaled_grads
        mean = self._mean(bucket, [grad.dequantize(torch.float32) for grad in grads], wire)
        for grad, value in zip(grads, mean, strict=True):
            new = scaled_gradient(value, grad.dtype)
            grad.codes.copy_(new.codes)
            grad.scale.copy_(new.scale)
        bucket.drop_residuals()

    def _mean(self, bucket: Bucket, values: list[Tensor], wire: torch.dtype) -> list[Tensor]:
        """The means over the ranks; flags that say which rank has a gradient travel in rows of their own."""
        layout, count = bucket.layout, len(values)
        rows = -(-count // (ROW * layout.world)) * layout.world
        flat = torch.zeros(layout.rows + rows, ROW, dtype=wire, device=values[0].device)
        body, flags = flat[: layout.rows], flat[layout.rows :].view(-1)
        torch._foreach_copy_(layout.views(body), values)
        flags[:count] = 1.0
        if any(bucket.absent):
            flags[:count].copy_(~torch.tensor(bucket.absent), non_blocking=True)
        plain_mean(flat.view(-1), self.ranks, in_rank_order=self.algorithm in ("two_shot", "hierarchical"))
        bucket.present, bucket.finite = flags[:count] > 0, body.isfinite().all()
        return layout.views(body)
