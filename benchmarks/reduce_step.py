"""Time of a training step of 7B-sized layers by how gradients are summed, against the same step that sums nothing.

    torchrun --nproc-per-node 4 benchmarks/reduce_step.py --micro-batch 1 8 --csv OUT.csv       # NCCL on GPUs
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/reduce_step.py --size tiny --micro-batch 1

A step is forward, backward, clipping and AdamW of `--layers` fused blocks in O2, compiled, `--eager` or replayed from a CUDA `--graph`
(which asks the least of the host, and so is the fastest over few tokens), with a small vocabulary, so that nearly all gradients are those
of converted weights. `none` leaves the sum out (`no_sync`): what a row takes beyond it is what computation does not hide. Median and
10th-90th percentile of the slowest rank's milliseconds, bytes that a rank sends a step.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import octavo
from octavo.distributed.launch import join
from octavo.models import SIZES, Transformer
from octavo.recipe import O2
from octavo.train.graph import StepGraph

REDUCTIONS = ("none", "two_shot", "nccl", "bf16", "fp32")
VOCABULARY = 4096


def measure(
    reduction: str, bucket_mb: float, micro_batch: int, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """One row."""
    size, layers = arguments.size, arguments.layers
    recipe = O2 if reduction == "none" else dataclasses.replace(O2, grad_reduce=reduction)  # type: ignore[arg-type]
    config = dataclasses.replace(SIZES[size], n_layers=layers, vocab_size=VOCABULARY, fused=True)
    model = Transformer.build(config, recipe, device=device, seed=0)
    plain, optimizer = octavo.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-5), recipe)
    assert optimizer is not None
    parallel = octavo.DataParallel(plain, bucket_mb=bucket_mb)
    compiled = device.type == "cuda" and not (arguments.eager or arguments.graph)
    if compiled:
        model.compile_blocks()
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (micro_batch, config.max_seq_len + 1), device=device)
    batches = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]

    def work(given: Iterable[tuple[Tensor, ...]]) -> Tensor:
        (batch,) = given
        with parallel.no_sync() if reduction == "none" else contextlib.nullcontext():
            loss = parallel(*batch)
            loss.backward()
        return loss.detach()

    graph = StepGraph(work, model.parameters(), after_replay=parallel.replayed) if arguments.graph else None
    slowest = torch.zeros((), dtype=torch.float64, device=device)
    times, sent = [], 0
    for repeat in range(arguments.repeats + 4):
        dist.barrier()
        before, start = parallel.wire.total(), time.perf_counter()
        (graph or work)(batches)
        octavo.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest.fill_(time.perf_counter() - start)
        sent = parallel.wire.total() - before
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if repeat >= 4:
            times.append(1e3 * slowest.item())
    if graph is not None:
        graph.close()
    times.sort()
    return {
        "reduction": reduction,
        "bucket_mb": bucket_mb,
        "mode": "graph" if graph else "compiled" if compiled else "eager",
        "ranks": dist.get_world_size(),
        "layers": f"{layers} of {size}",
        "tokens_per_rank": micro_batch * config.max_seq_len,
        "ms": round(statistics.median(times), 2),
        "ms_p10": round(times[len(times) // 10], 2),
        "ms_p90": round(times[-1 - len(times) // 10], 2),
        "sent_bytes": sent,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (gloo)",
        "torch": torch.__version__,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", choices=SIZES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=list(REDUCTIONS), choices=REDUCTIONS)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[128.0], help="of DataParallel")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--csv")
    arguments = parser.parse_args()
    place = join("auto")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if place.world == 1:
        sys.exit("start it with torchrun and at least two processes")
    rows = []
    for micro_batch in arguments.micro_batch:
        for reduction in arguments.only:
            for bucket_mb in arguments.bucket_mb[: 1 if reduction == "none" else None]:
                rows.append(measure(reduction, bucket_mb, micro_batch, arguments, device))
                if place.is_first:
                    print(rows[-1], flush=True)
    if place.is_first and arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    place.wait()
    place.leave()


if __name__ == "__main__":
    main()
