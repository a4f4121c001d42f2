"""What the demo corpus costs: seconds, peak memory and MB/s of each stage of `octavo prepare demo`.

    python benchmarks/prepare_demo.py [OUT] [--workers 2] [--csv benchmarks/results/prepare_demo.csv]

Seconds are those of the clock, so run it on a machine that does nothing else; where a run was killed and resumed, of all its parts.
A corpus that is finished in OUT is not made again, its report is read.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from octavo.prepare.config import load_config
from octavo.prepare.pipeline import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="corpora/demo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "prepare_demo.csv")
    args = parser.parse_args()
    if not (Path(args.out) / "report.json").exists():
        prepare(load_config("demo", [f"out={args.out}", f"workers={args.workers}"]))
    stages = json.loads((Path(args.out) / "report.json").read_text(encoding="utf-8"))["stages"]
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(stages[0]))
        writer.writeheader()
        writer.writerows(stages)
    print(
        f"{sum(s['seconds'] for s in stages) / 60:.1f} minutes, at most {max(s['peak_bytes'] for s in stages) / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
