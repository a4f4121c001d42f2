"""Replicas: every rank holds the same model, at the start and after each step.

At the start the models are compared by their description (names, shapes, dtypes, formats), and rank 0's values are sent to all:
parameters, buffers and past maxima of delayed scaling; of a `ScaledTensor` codes *and* scale, for ranks that agree on
one and not on the other would disagree on every weight. Later a checksum of each parameter's bits finds drift (a rank that
skipped a step, a broken device, a parameter that one rank changed by hand) and names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.distributed.algorithms import SCALES
from octavo.distributed.collectives import Ranks
from octavo.formats import NumericsError
from octavo.linear import FP8Linear, drop_weight_cache
from octavo.linear.module import SCALINGS
from octavo.tensor import ScaledTensor

PARAMETERS, CHECKS = "parameters", "checks"
"""Kinds of bytes on the wire."""
CHUNK = 2**20
"""Elements that are summed at a time."""


def check_alike(model: nn.Module, ranks: Ranks, wrapper: str) -> None:
    """Raises `ValueError` on all ranks, naming the first difference to rank 0, if models or `wrapper` are not described alike."""
    lists = ranks.gather_objects([*_describe(model), wrapper])
    for rank, entries in enumerate(lists):
        for wanted, found in zip_longest(lists[0], entries, fillvalue="nothing more"):
            if wanted != found:
                raise ValueError(
                    f"the ranks have different models: rank 0 has {wanted}, rank {rank} has {found}; build and convert the same "
                    "model on every rank before it is wrapped"
                )


def _describe(model: nn.Module) -> Iterator[str]:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        stored = f" stored in {tensor.format} codes" if isinstance(tensor, ScaledTensor) else ""
        frozen = "" if tensor.requires_grad or not tensor.is_leaf or not isinstance(tensor, nn.Parameter) else " frozen"
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}{stored}{frozen}"
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            yield f"{name} with {module.recipe}"


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    if isinstance(tensor, ScaledTensor):
        return [part for part in (tensor.codes, tensor.scale, tensor.residual) if part is not None]
    return [tensor.detach()]


@torch.no_grad()
def send_from_first(model: nn.Module, ranks: Ranks) -> None:
    """Gives every rank the parameters, buffers and delayed scales of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        for part in _parts(tensor):
            _send(part, ranks)
        if isinstance(tensor, ScaledTensor):
            tensor._storage.mark_written()
    for module in model.modules():
        if isinstance(module, FP8Linear):
            for name in SCALINGS:
                scaling = getattr(module, name)
                if scaling is not None:
                    state = {key: value.to(module.weight.device) for key, value in scaling.state_dict().items()}
                    for value in state.values():
                        _send(value, ranks)
                    scaling.load_state_dict(state)
    drop_weight_cache(model.parameters())


@torch.no_grad()
def share_maxima(model: nn.Module, ranks: Ranks) -> None:
    """Takes the maxima that delayed scaling has seen in this step over all ranks, so that all have the same windows.

    A layer that ran on other ranks only counts here too; the host waits for the device only to learn of such a layer.
    """
    layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
    scalings = [s for layer in layers for s in (layer.input_scaling, layer.grad_output_scaling) if s is not None]
    if not scalings:
        return
    device = layers[0].weight.device
    missing = [not scaling.takes_part for scaling in scalings]
    pending = torch.stack([scaling.pending.to(device) for scaling in scalings])
    recorded = torch.ones_like(pending)
    for value, gone in zip(recorded.unbind(), missing, strict=True):
        if gone:
            value.zero_()
    both = torch.cat([pending, recorded])
    ranks.all_reduce(both, dist.ReduceOp.MAX, SCALES)
    for scaling, value in zip(scalings, both[: len(scalings)].unbind(), strict=True):
        scaling.pending.copy_(value)
    if any(missing):
        for scaling, gone, seen in zip(scalings, missing, both[len(scalings) :].tolist(), strict=True):
            if gone:
                scaling._recorded = seen > 0


def _send(tensor: Tensor, ranks: Ranks) -> None:
    """Broadcasts the bytes of a tensor of any dtype and strides, into the same memory."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # expanded: all its values along this dimension are one in memory
            tensor = tensor.narrow(dim, 0, 1)
    whole = tensor.contiguous()
    flat = whole.view(-1).view(torch.uint8) if whole.numel() else whole.new_empty(0, dtype=torch.uint8)
    ranks.broadcast(flat, PARAMETERS)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def checksum(tensor: Tensor) -> Tensor:
    """A sum over the bits of a parameter and their places, int64, 0-d: equal for equal bits, on any device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in _parts(tensor):
        flat = part.contiguous().view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK):
            chunk = flat[start : start + CHUNK].long()
            place = torch.arange(start, start + chunk.numel(), device=tensor.device)
            # An odd multiplier for each place: no change of a single byte leaves the sum (modulo 2^64) as it was.
            total = total * 31 + (chunk * (place * 2654435761 | 1)).sum()
    return total


@torch.no_grad()
def check_equal(model: nn.Module, ranks: Ranks) -> None:
    """Raises `NumericsError` on all ranks, naming the parameter, if one does not have the same bits everywhere. Waits for the device."""
    named = list(model.named_parameters())
    if not named:
        return
    sums = torch.stack([checksum(param).to(named[0][1].device) for _, param in named])
    lowest, highest = sums.clone(), sums.clone()
    ranks.all_reduce(lowest, dist.ReduceOp.MIN, CHECKS)
    ranks.all_reduce(highest, dist.ReduceOp.MAX, CHECKS)
    different = [name for (name, _), differs in zip(named, (lowest != highest).tolist(), strict=True) if differs]
    if different:
        raise NumericsError(
            f"{len(different)} of {len(named)} parameters differ between the ranks, first {', '.join(different[:3])}: one rank "
            "changed its weights by itself or computes wrongly; continue from the last checkpoint"
        )
