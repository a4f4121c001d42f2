"""Planned against allocated: the peak of `octavo plan` beside `torch.cuda.max_memory_allocated` for a list of configs, as a CSV.

    python benchmarks/plan_h200.py [--only 7b "13b, 3"] [--csv results/plan_h200.csv]

Each case trains a few steps of random tokens in a process of its own, so that no case sees another's memory, and reads the peak of the
steps after the second, when states exist and the compiler is done. The row has both peaks, their ratio, where the plan has its
peak, and the time of a step (median, smallest, largest) beside the planned one. A case that does not fit is a row too.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from octavo.optim import clip_grad_norm_
from octavo.plan import make_plan
from octavo.settings import override
from octavo.train.presets import get_preset
from octavo.train.setup import build_model, build_optimizer, build_release

VOCABULARY = 50_257
TWENTY = ("model.dim=6144", "model.n_layers=44", "model.n_heads=48")
ONE, APART = "train.micro_batches=1", "model.fused=false"
CASES: dict[str, tuple[str, ...]] = {
    "125m bf16": ("gpt_125m", "recipe=bf16", "data.micro_batch=32", ONE, APART),
    "125m": ("gpt_125m", "data.micro_batch=32", ONE),
    "125m eager": ("gpt_125m", "data.micro_batch=32", ONE, "train.compile=false"),
    "125m apart": ("gpt_125m", "data.micro_batch=32", ONE, APART),
    "125m selective": ("gpt_125m", "data.micro_batch=32", ONE, "model.recompute=selective"),
    "125m full": ("gpt_125m", "data.micro_batch=32", ONE, "model.recompute=full"),
    "125m accumulating": ("gpt_125m", "data.micro_batch=16", "train.micro_batches=3"),
    "7b bf16": ("gpt_7b", "recipe=bf16", "data.micro_batch=1", ONE, APART),
    "7b": ("gpt_7b", "data.micro_batch=2", ONE),
    "7b, 8": ("gpt_7b", "data.micro_batch=8", ONE),
    "7b eager": ("gpt_7b", "data.micro_batch=2", ONE, "train.compile=false"),
    "7b apart": ("gpt_7b", "data.micro_batch=2", ONE, APART),
    "7b release": ("gpt_7b", "data.micro_batch=4", ONE, "optim.release=partial"),
    "llama 7b selective": ("llama_7b", "data.micro_batch=4", ONE, "model.recompute=selective"),
    "13b accumulating": ("gpt_13b", "data.micro_batch=1", "train.micro_batches=3"),
    "13b, 3": ("gpt_13b", "data.micro_batch=3", "train.micro_batches=4"),
    "13b full, release": ("gpt_13b", "data.micro_batch=8", ONE, "model.recompute=full", "optim.release=partial"),
    "20b full": ("gpt_13b", *TWENTY, "data.micro_batch=2", ONE, "model.recompute=full"),
    "20b, 24 blocks again": (
        "gpt_13b",
        *TWENTY,
        "data.micro_batch=4",
        ONE,
        "model.recompute=full",
        "model.recompute_layers=24",
    ),
    "20b full, release": (
        "gpt_13b",
        *TWENTY,
        "data.micro_batch=8",
        ONE,
        "model.recompute=full",
        "optim.release=partial",
    ),
}


def run_case(name: str, steps: int) -> dict[str, Any]:
    """Train the case on the current GPU and compare. An out-of-memory error gives a row without figures."""
    preset, *settings = CASES[name]
    config = override(get_preset(preset), [f"model.vocab_size={VOCABULARY}", "model.break_even=none", *settings])
    plan = make_plan(config, "h200")
    row: dict[str, Any] = {
        "case": name,
        "settings": " ".join(CASES[name]),
        "planned_GiB": plan.tape.peak / 2**30,
        "planned_at": plan.tape.when,
        "planned_s": plan.time.seconds,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    device = torch.device("cuda")
    try:
        model = build_model(config, VOCABULARY, device)
        optimizer = build_optimizer(config, model)
        release = build_release(config, model, optimizer)
        if config.train.compile:
            model.compile_blocks()
        times = []
        for step in range(steps + 2):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.zero_grad()
            for _ in range(config.train.micro_batches):
                tokens = torch.randint(VOCABULARY, (2, config.data.micro_batch, config.data.seq_len), device=device)
                loss = model(tokens[0], tokens[1]) / config.train.micro_batches
                if release is None:
                    loss.backward()
                else:
                    release.step(loss)
                del loss, tokens
            if release is None:
                clip_grad_norm_(model.parameters(), config.optim.clip or float("inf"))
                optimizer.step()
            torch.cuda.synchronize()
            if step >= 2:
                times.append(time.perf_counter() - start)
    except torch.OutOfMemoryError as error:
        return {**row, "note": str(error).splitlines()[0]}
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        **row,
        "allocated_GiB": peak,
        "planned_over_allocated": row["planned_GiB"] / peak,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
        "s_median": statistics.median(times),
        "s_min": min(times),
        "s_max": max(times),
        "tokens_per_s": config.tokens_per_step / statistics.median(times),
    }


FIELDS = (
    "case",
    "settings",
    "planned_GiB",
    "allocated_GiB",
    "planned_over_allocated",
    "reserved_GiB",
    "planned_at",
    "planned_s",
    "s_median",
    "s_min",
    "s_max",
    "tokens_per_s",
    "gpu",
    "torch",
    "commit",
    "note",
)


def main() -> None:
    """Run every case in a process of its own and write the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, help="cases", metavar="CASE")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after two others")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(arguments.case, arguments.steps)))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows: list[dict[str, Any]] = []
    for name in arguments.only:
        command = [sys.executable, __file__, "--case", name, "--steps", str(arguments.steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            row = {"case": name, "note": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        else:
            row = json.loads(done.stdout.strip().splitlines()[-1])
        rows.append({**row, "commit": commit})
        print(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True
        )
        if arguments.csv:
            with arguments.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=FIELDS)
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
