"""Bytes per parameter of converted layers, counted by `octavo.memory_report` and confirmed by the CUDA allocator.

Builds a stack of linear layers with the shapes of one 7B GPT block (d 4096, FFN 4d), trains a few steps, and reads
`torch.cuda.memory_allocated` after backward (weights + gradients + states) and the peak inside `optimizer.step()`. The stack holds
nothing else, so the allocator's difference to an empty device is exactly what the recipe stores.

    python benchmarks/memory.py [--blocks 8] [--recipe O2] [--csv results/memory.csv]
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import subprocess
from pathlib import Path

import torch
from torch import nn

import octavo

SHAPES = ((4096, 3 * 4096), (4096, 4096), (4096, 16384), (16384, 4096))


class Stack(nn.Module):
    """Linear layers of `blocks` GPT blocks; each adds its mean-reduced output, so that every weight gets a dense gradient."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False) for _ in range(blocks) for k, n in SHAPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 4)
        return torch.stack(
            [(layer(x if layer.in_features == 4096 else wide).float() ** 2).mean() for layer in self.layers]
        ).sum()


def _allocate_workspaces() -> None:
    """cuBLAS takes its workspaces (about 64 MiB) from the same allocator at the first GEMM, and keeps them."""
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = octavo.convert(nn.Sequential(nn.Linear(64, 64, device="cuda")), "O2", filter=lambda module, fqn: True)
    (layer(x) @ x.t()).float().sum().backward()


def measure(recipe: str, blocks: int, steps: int = 4) -> dict[str, float | int | str]:
    """Resident and peak bytes per parameter under `recipe` on the current CUDA device."""
    torch.manual_seed(0)
    _allocate_workspaces()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = Stack(blocks)
    count = sum(p.numel() for p in model.parameters())
    model, optimizer = octavo.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), recipe=recipe)
    x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    times = []
    for _ in range(steps):
        model(x).backward()
        x.grad = None
        torch.cuda.synchronize()
        gradients_in = torch.cuda.memory_allocated() - base - x.nbytes
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        peak = torch.cuda.max_memory_allocated() - base - x.nbytes
        resident = torch.cuda.memory_allocated() - base - x.nbytes
        report = octavo.memory_report(model, optimizer)
        optimizer.zero_grad(set_to_none=True)
    print(report)
    return {
        "recipe": recipe,
        "parameters": count,
        "after_backward_B_per_param": gradients_in / count,
        "peak_in_step_B_per_param": peak / count,
        "resident_B_per_param": resident / count,
        "step_ms_median": statistics.median(times[1:]),
        "step_ms_min": min(times[1:]),
        "step_ms_max": max(times[1:]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }


def main() -> None:
    """Measure each recipe and print, or append to a CSV, one row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--recipe", nargs="+", default=["O2"])
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = [measure(recipe, args.blocks) for recipe in args.recipe]
    for row in rows:
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
