"""Algorithms that sum a bucket of gradients over ranks.

| name         | what travels                       | sum                           | rounded to E4M3                |
|--------------|------------------------------------|-------------------------------|--------------------------------|
| two_shot     | all-to-all and all-gather of codes | FP32 on the rank of the part  | once                           |
| hierarchical | the same in a node, then between   | FP32                          | once a level                   |
| nccl         | FP8 all-reduce of the backend      | along the ring                | at each of N - 1 hops          |
| bf16, fp32   | all-reduce of real values          | the backend's, in that format | once, into the stored gradient |

An FP8 algorithm takes E4M3 codes [rows, ROW] of one shared scale (see `scales`), writes the sum's codes over them, and returns
the `gain` of each tensor: codes = gain · Σ codes_i. All ranks end with the same bits.

`two_shot` casts each tensor's sum with a scale of its own, from the largest sum in any rank's part (one more small collective), so
no result depends on where a tensor lies in its bucket, on the size of buckets or on which rank sums: the bits are those
of one process that adds all ranks' codes. The same bytes go over the wire as in a ring.

`nccl` is the published method. Where the backend cannot sum FP8 (gloo), the codes of each part go to the rank where the ring would
end, which adds them in the ring's order and rounds at each hop: the same values and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from octavo import kernels
from octavo.distributed.codes import ring_sum
from octavo.distributed.collectives import Ranks, new_group
from octavo.distributed.layout import ROW, Layout

GRADIENTS, SCALES = "gradients", "scales"
"""Kinds of bytes on the wire."""

Algorithm = Callable[[Tensor, Layout, Ranks], Tensor]


def two_shot(codes: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
    """All-to-all, FP32 sum, one cast, all-gather."""
    return _level(codes, layout, ranks, ranks, slice(0, layout.rows))


def hierarchical(node: Ranks, across: Ranks) -> Algorithm:
    """Two-shot among the ranks of a `node`, and within it, for the part that a rank has summed, among its peers `across` nodes.

    Ranks are numbered node by node. Of each tensor 1/ranks-per-node crosses the slow link, in FP8.
    """

    def reduce(codes: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
        each = layout.rows // node.world
        part = slice(node.rank * each, (node.rank + 1) * each)

        def between(mine: Tensor) -> Tensor:
            return _level(mine, layout, across, ranks, part)

        return _level(codes, layout, node, ranks, slice(0, layout.rows), between)

    return reduce


def _level(
    codes: Tensor,
    layout: Layout,
    peers: Ranks,
    all_ranks: Ranks,
    rows: slice,
    inner: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """One two-shot over `peers` of `codes`, which are the `rows` of the bucket; `inner` sums the part of this rank further."""
    each = (rows.stop - rows.start) // peers.world
    first = rows.start + peers.rank * each
    received = torch.empty_like(codes)
    peers.all_to_all(received, codes, GRADIENTS)
    amax, sums = kernels.sum_codes(received.view(peers.world, each, ROW), layout.places, first)
    all_ranks.all_reduce(amax, dist.ReduceOp.MAX, SCALES)
    mine, gain = kernels.cast_sum(sums, amax, layout.places, first)
    if inner is not None:
        gain = gain * inner(mine)
    peers.all_gather(codes, mine, GRADIENTS)
    return gain


def nccl(codes: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
    """The backend's FP8 all-reduce, or the same hop by hop."""
    if ranks.sums_fp8(codes.device):
        ranks.all_reduce(codes, dist.ReduceOp.SUM, GRADIENTS)
    else:
        received = torch.empty_like(codes)
        ranks.all_to_all(received, codes, GRADIENTS)
        mine = ring_sum(received.view(ranks.world, -1, ROW), ranks.rank)
        ranks.all_gather(codes, mine, GRADIENTS)
    return layout.ones


def algorithm_of(name: str, ranks: Ranks, node_size: int | None, timeout: timedelta) -> Algorithm | None:
    """That of `Recipe.grad_reduce`, None for one that travels as real values; with groups of its own, if it has levels.

    Raises `ValueError` for a `node_size` that does not divide the ranks, where nodes matter.
    """
    if name != "hierarchical":
        return {"two_shot": two_shot, "nccl": nccl}.get(name)
    if node_size is None or ranks.world % node_size or node_size < 1:
        raise ValueError(
            f"grad_reduce='hierarchical' needs node_size, a divisor of the {ranks.world} ranks, but it is {node_size}"
        )
    if node_size in (1, ranks.world):  # one level
        return two_shot
    members = dist.get_process_group_ranks(ranks.group)
    nodes = [members[i : i + node_size] for i in range(0, ranks.world, node_size)]
    across = [list(peers) for peers in zip(*nodes, strict=True)]
    mine = dist.get_rank()
    own = [new_group(part, timeout, of=ranks.group) for part in nodes + across if mine in part]
    return hierarchical(*(Ranks(group, ranks.wire) for group in own))


def plain_mean(flat: Tensor, ranks: Ranks, in_rank_order: bool, kind: str = GRADIENTS) -> None:
    """flat = its mean over all ranks, in place; real values of any floating dtype, numel a multiple of the number of ranks.

    In rank order the sum is FP32 (or FP64) and the mean is rounded once, so its bits do not depend on the position in the bucket; else
    it is the backend's all-reduce. That of FP16 divides first: a sum may overflow where the mean does not.
    """
    if not in_rank_order:
        if flat.dtype == torch.float16:
            flat.div_(ranks.world)
        ranks.all_reduce(flat, dist.ReduceOp.SUM, kind)
        if flat.dtype != torch.float16:
            flat.div_(ranks.world)
        return
    received = torch.empty_like(flat)
    ranks.all_to_all(received, flat, kind)
    parts = received.view(ranks.world, -1)
    total = parts[0].to(torch.promote_types(flat.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    ranks.all_gather(flat, total.div_(ranks.world).to(flat.dtype), kind)
