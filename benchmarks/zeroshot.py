"""Zero-shot scores of a Hugging Face checkpoint: ours against the harness's own `hf` model, and FP8 against BF16 or FP32.

    python benchmarks/zeroshot.py MODEL TASKS [--limit N] [--device cuda] [--recipe O2] [--skip-hf] [--out FOLDER]

MODEL is a Hugging Face folder, TASKS a folder of JSON lines (docs/evaluation.md). Three runs on the same records:

1. `hf` of lm-evaluation-harness in FP32
2. ours in FP32: every item must have the same answers as 1, and log-probabilities within `TOLERANCE`
3. ours in `--dtype`, plain and in `--recipe`: accuracies with paired differences and their 95% intervals

Nothing is read from a network. It prints the tables and writes zeroshot.json beside the results in `--out`; exit code 1 if
1 and 2 differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when these libraries are imported

from lm_eval.evaluator import evaluate as harness_evaluate
from lm_eval.models.huggingface import HFLM

from octavo.evaluate import EvalConfig, Results, evaluate
from octavo.evaluate.tasks import harness_tasks, read_tasks

TOLERANCE = 1e-4
"""In nats, on a log-probability of -100 and above; relative to its hundredth below. FP32 sums in another order give 1e-5."""


def main() -> int:
    options = _options()
    out = Path(options.out)
    common = {
        "tasks": options.tasks,
        "limit": options.limit,
        "device": options.device,
        "batch_tokens": options.batch_tokens,
    }
    report: dict = {"model": options.model, "limit": options.limit, "device": options.device}
    equal = True
    if not options.skip_hf:
        start = time.perf_counter()
        mine = evaluate(EvalConfig([options.model], ["bf16"], dtype="fp32", out=str(out / "fp32"), **common))[0]
        middle = time.perf_counter()
        report["hf"] = _compare_with_hf(mine, options)
        report["seconds"] = {"ours": round(middle - start, 1), "hf": round(time.perf_counter() - middle, 1)}
        equal = report["hf"]["unequal"] == []
        print(json.dumps(report, indent=1), flush=True)
    if not options.skip_fp8:
        evaluate(EvalConfig([options.model], ["bf16", options.recipe], dtype=options.dtype, out=str(out), **common))
    out.mkdir(parents=True, exist_ok=True)
    (out / "zeroshot.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if equal else 1


def _compare_with_hf(mine: Results, options: argparse.Namespace) -> dict:
    """Both on the same records: items, the largest difference of a log-probability, and the items that are not equal."""
    local, _ = read_tasks(options.tasks, None, options.limit)
    model = HFLM(pretrained=options.model, device=_device(options.device), dtype="float32", batch_size=options.hf_batch)
    with tempfile.TemporaryDirectory() as scratch:
        tasks = harness_tasks(local, Path(scratch))
        for task in tasks["tasks"].values():
            task.set_config(key="num_fewshot", value=0)
        samples = harness_evaluate(model, tasks, bootstrap_iters=0)["samples"]
    largest, count, unequal = 0.0, 0, []
    for name, theirs in samples.items():
        own = mine.find(name)
        assert own is not None and len(own.items) == len(theirs)
        for a, b in zip(own.items, sorted(theirs, key=lambda sample: sample["doc_id"]), strict=True):
            answers = [tuple(answer) for answer in b["filtered_resps"]]
            gaps = [abs(x - y) / max(1.0, abs(y) / 100) for x, (y, _) in zip(a["logprobs"], answers, strict=True)]
            same = a["prompt"] == b["prompt_hash"] and a["greedy"] == [greedy for _, greedy in answers]
            same = same and all(a[metric] == b[metric] for metric in ("acc", "acc_norm") if metric in b)
            largest, count = max(largest, *gaps), count + 1
            if not same or not max(gaps) <= TOLERANCE:
                values = {"gap": max(gaps), "same_answers": same, "ours": a["logprobs"], "hf": answers}
                unequal.append({"task": name, "item": a["item"], **values})
    other = sum(not one["same_answers"] for one in unequal)
    return {"items": count, "largest_gap": largest, "other_answers": other, "unequal": unequal}


def _device(name: str) -> str:
    import torch

    return name if name != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tasks")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--recipe", default="O2")
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--hf-batch", type=int, default=8, help="rows of a batch of the harness's own model")
    parser.add_argument("--skip-hf", action="store_true")
    parser.add_argument("--skip-fp8", action="store_true")
    parser.add_argument("--out", default="runs/zeroshot")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
