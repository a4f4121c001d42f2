"""Time, bytes and SNR of the gradient reduction by algorithm, scale work included.

    torchrun --nproc-per-node 4 benchmarks/reduce.py --elements 16777216 268435456 --csv OUT.csv       # NCCL on GPUs
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/reduce.py --elements 1048576              # gloo on a CPU

A row is one bucket of `--tensors` equal tensors of Gaussian gradients, reduced `--repeats` times: median and 10th-90th percentile of
the slowest rank's milliseconds, bytes that a rank sends, SNR of the mean against FP64. `bf16` and `fp32` are the same gradients
as plain tensors, which the backend's all-reduce sums.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist

from octavo.distributed.algorithms import nccl, two_shot
from octavo.distributed.autoscale import AutoScale
from octavo.distributed.buckets import Bucket, Member, Reduction
from octavo.distributed.collectives import Ranks
from octavo.distributed.launch import join
from octavo.distributed.layout import Layout
from octavo.linear import scaled_gradient

ALGORITHMS = ("two_shot", "nccl", "bf16", "fp32")


def measure(algorithm: str, elements: int, tensors: int, repeats: int, device: torch.device) -> dict[str, object]:
    """One row. The gradients are made anew for each repetition, outside of the time."""
    ranks = Ranks(wire=Counter())
    fp8 = algorithm in ("two_shot", "nccl")
    names = [str(i) for i in range(tensors)]
    scale = AutoScale(names, ranks.world, sums_exactly=algorithm == "two_shot", device=device)
    functions = {"two_shot": two_shot, "nccl": nccl}
    reduction = Reduction(ranks, algorithm, functions.get(algorithm), scale)
    shape = torch.Size([elements // tensors])
    torch.manual_seed(ranks.rank)
    values = [torch.randn(shape, device=device) for _ in names]
    exact = [value.double() for value in values]
    for value in exact:
        dist.all_reduce(value)
        value /= ranks.world
    params = [torch.nn.Parameter(torch.empty(shape, device=device)) for _ in names]
    members = [
        Member(name, param, i if fp8 else None) for i, (name, param) in enumerate(zip(names, params, strict=True))
    ]
    bucket = Bucket(
        members, Layout([shape] * tensors, ranks.world, device), torch.arange(tensors if fp8 else 0, device=device)
    )
    times = []
    for repeat in range(repeats + 3):
        for param, value in zip(params, values, strict=True):
            param.grad = scaled_gradient(value, torch.float32) if fp8 else value.clone()
        bucket.start()
        bucket.take()
        before = sum(ranks.wire.values())
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        reduction.reduce(bucket)
        synchronize(device)
        taken = torch.tensor([time.perf_counter() - start], device=device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        if repeat >= 3:
            times.append(1e3 * taken.item())
        sent = sum(ranks.wire.values()) - before
        bucket.give()
    signal = sum(float(value.square().sum()) for value in exact)
    noise = sum(
        float((param.grad.dequantize() if fp8 else param.grad).double().sub(value).square().sum())
        for param, value in zip(params, exact, strict=True)
    )
    times.sort()
    return {
        "algorithm": algorithm,
        "ranks": ranks.world,
        "elements": elements,
        "tensors": tensors,
        "ms": round(statistics.median(times), 4),
        "ms_p10": round(times[len(times) // 10], 4),
        "ms_p90": round(times[-1 - len(times) // 10], 4),
        "sent_bytes": sent,
        "snr_db": round(10 * float(torch.log10(torch.tensor(signal / max(noise, 1e-300)))), 2),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (gloo)",
        "torch": torch.__version__,
    }


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[2**24])
    parser.add_argument("--tensors", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--csv")
    arguments = parser.parse_args()
    place = join("auto")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if place.world == 1:
        sys.exit("start it with torchrun and at least two processes")
    rows = [
        measure(algorithm, elements, arguments.tensors, arguments.repeats, device)
        for elements in arguments.elements
        for algorithm in arguments.algorithms
    ]
    if place.is_first:
        with open(arguments.csv, "w", newline="") if arguments.csv else sys.stdout as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    place.wait()
    place.leave()


if __name__ == "__main__":
    main()
