"""What one FP8Linear asks of the host, forward and backward, beside a BF16 `nn.Linear`: small layers are bound by it.

The host's time of a call is how long it takes to ask for it: as many calls in a row as leave the device's queue (1,024 launches) half
empty, between two readings of a clock and without waiting for the device. The device's time of the same calls is that between two
CUDA events, so where the host is slower it is the host's too; a CUDA graph of one call shows the device alone. The layer is in recipe
O2, as after `octavo.convert`, with bias; weight and gradients are cast in every call, as in the first micro-batch of a step. Medians of
`--repeats` repeats with their spread, and the number of kernels in a call. Each timed layer must agree with BF16 on the inputs
that are timed: FP8 leaves 3.7% in y and 5.8% in both gradients (see `octavo.bench.linear`), more than BOUND raises.

    python benchmarks/linear_host.py [--csv benchmarks/results/linear_host.csv]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.bench.rows import conditions
from octavo.bench.run import relative_error
from octavo.bench.timing import captured
from octavo.tensor import ScaledTensor

SHAPES = ("4096x4096", "4096x16384", "2048x2048", "1024x1024")
BOUND = 0.10
CALLS = 20
"""Calls of a repeat. An eager one makes fewer than 25 launches."""
WARMUP = 5

Call = Callable[[], Tensor]


def build(
    variant: str, inputs: int, outputs: int, tokens: int, device: torch.device
) -> tuple[Call, Callable[[], float]]:
    """(a call: forward and backward, returning y; the error of y and all gradients against BF16)."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16))
    w, b = (p.detach().clone() for p in layer.parameters())
    if variant != "bf16":
        layer = octavo.convert(layer, variant, filter=lambda module, fqn: True)
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
    parameters = list(layer.parameters())

    def call() -> Tensor:
        x.grad = None
        for p in parameters:
            p.grad = None
        y = layer(x)
        y.backward(dy)
        return y

    def error() -> float:
        y = call()
        gradients = [p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad for p in parameters]
        want = (F.linear(x.detach(), w, b), dy @ w, dy.t() @ x.detach(), dy.float().sum(0))
        return relative_error((y, x.grad, *gradients), want)

    return call, error


def repeat(call: Call, calls: int, device: torch.device) -> tuple[float, float | None]:
    """Milliseconds of one call on the host, and on the device if that is another."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e3 / calls, None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    host = (time.perf_counter() - start) * 1e3 / calls
    end.record()
    end.synchronize()
    return host, begin.elapsed_time(end) / calls


def kernels_of(call: Call) -> int:
    """Kernels, copies and fills that one call puts on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure(
    variant: str, mode: str, inputs: int, outputs: int, tokens: int, repeats: int, device: torch.device
) -> dict[str, str | float | int | None]:
    """A row. Raises `RuntimeError` if the layer does not agree with BF16."""
    call, error = build(variant, inputs, outputs, tokens, device)
    for _ in range(WARMUP):
        call()
    wrong = error()
    if not wrong <= BOUND:
        raise RuntimeError(f"{variant}, {inputs} → {outputs}: relative error {wrong:.3g}, at most {BOUND} is FP8's")
    count = kernels_of(call) if device.type == "cuda" else None
    timed = captured(call) if mode == "graph" else call
    host, gpu = zip(*(repeat(timed, CALLS, device) for _ in range(repeats)), strict=True)
    row: dict[str, str | float | int | None] = {
        "tokens": tokens,
        "inputs": inputs,
        "outputs": outputs,
        "variant": variant,
        "mode": mode,
        "kernels": count,
        "error": wrong,
        "repeats": repeats,
        "calls": CALLS,
    }
    for name, values in (("host", host), ("gpu", [value for value in gpu if value is not None])):
        for part, of in (("ms", statistics.median), ("ms_min", min), ("ms_max", max)):
            row[f"{name}_{part}"] = of(values) if values else None
    return row


def line(row: dict[str, str | float | int | None], baseline: dict[str, str | float | int | None]) -> str:
    """The row for people."""
    text = f"{row['inputs']:>6} → {row['outputs']:<6} {row['variant']:<5} {row['mode']:<6}"
    for name in ("host", "gpu"):
        if row[f"{name}_ms"] is not None:
            median, least, most = (row[f"{name}_{part}"] for part in ("ms", "ms_min", "ms_max"))
            text += f"  {name} {median:.3f} ms ({least:.3f}–{most:.3f})"
    if isinstance(row["gpu_ms"], float) and isinstance(baseline["gpu_ms"], float):
        text += f"  {baseline['gpu_ms'] / row['gpu_ms']:.2f}×"
    return text + (f"  {row['kernels']} kernels" if row["kernels"] else "") + f"  error {row['error']:.3f}"


def main(arguments: Sequence[str] | None = None) -> list[dict[str, str | float | int | None]]:
    """Measure, print a table, write the CSV; returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="INPUTSxOUTPUTS")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--recipe", default="O2")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    rows = []
    for shape in args.shapes:
        inputs, outputs = map(int, shape.split("x"))
        for mode in ("eager", "graph") if device.type == "cuda" else ("eager",):
            pair = [
                measure(variant, mode, inputs, outputs, args.tokens, args.repeats, device)
                for variant in ("bf16", args.recipe)
            ]
            for row in pair:
                print(line(row, pair[0]), flush=True)
            rows += [row | conditions(device) for row in pair]
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return rows


if __name__ == "__main__":
    main()
