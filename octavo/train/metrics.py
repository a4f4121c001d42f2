"""What a run records, and where: one JSON line a step, TensorBoard events if wanted.

Every step has `step`, `tokens`, `loss`, `grad_norm`, `lr` and `skipped`, exact and bitwise repeatable. A log step adds what
depends on the machine: `tokens_per_s`; `tflops`, the model's arithmetic in TFLOP/s (6 FLOPs a weight and token plus attention,
recomputation not counted, of one GPU); `mfu_bf16` and `mfu_fp8`, that over the GPU's dense peak in either format, with the peak named in
`run.json`; `memory`, bytes by kind; `epochs`, passes over each source of text. An FP8 run quoted against the BF16 peak looks
better than it is, so both are recorded.

Every `log.stats_every` steps there are `casts`, what the casts of converted layers lost, and `gradients`, of each FP8 gradient its
scale and what its reduction over several ranks lost against one in FP32 (`gradient_stats`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.distributed.samples import Loss


@dataclass(frozen=True)
class Peak:
    """Dense matrix throughput of a GPU from its datasheet, in TFLOP/s; `fp8` is None where there is no FP8."""

    name: str
    bf16: float
    fp8: float | None


# By device name; the first that matches counts, so the slower variants of a chip come before its SXM form.
PEAKS = (
    Peak("H100 PCIe", 756, 1513),
    Peak("H100 NVL", 835, 1671),
    Peak("H200 NVL", 835, 1671),
    Peak("H100", 989, 1979),
    Peak("H200", 989, 1979),
    Peak("B200", 2250, 4500),
    Peak("A100", 312, None),
)


def peak_of(device_name: str) -> Peak | None:
    """The datasheet peak of a GPU by the name that CUDA gives it, or None: a guessed peak would make a false MFU."""
    return next((peak for peak in PEAKS if all(word in device_name for word in peak.name.split())), None)


def throughput(tokens: int, seconds: float, flops_per_token: float, peak: Peak | None) -> dict[str, float]:
    """Rates of a stretch of training: `tokens_per_s`, `tflops` and, where the peak is known, `mfu_bf16`, `mfu_fp8`."""
    rate = tokens / max(seconds, 1e-9)
    tflops = rate * flops_per_token / 1e12
    record = {"tokens_per_s": rate, "tflops": tflops}
    if peak is not None:
        record["mfu_bf16"] = tflops / peak.bf16
        if peak.fp8 is not None:
            record["mfu_fp8"] = tflops / peak.fp8
    return record


def layer_group(fqn: str) -> str:
    """`blocks.3.attention.qkv` → `attention.qkv`: the same layer of all blocks."""
    names = fqn.split(".")
    last = max((i for i, name in enumerate(names) if name.isdigit()), default=-1)
    return ".".join(names[last + 1 :]) or fqn


def group_stats(stats: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Shares of saturated and flushed values by layer group.

    `stats` is what `octavo.linear.collect_stats` gives: by layer and quantity (input, weight, grad_output, grad), counts `saturated`,
    `flushed` and `numel`. Keys of the result are `GROUP/QUANTITY`, values shares in [0, 1].
    """
    sums: dict[str, dict[str, float]] = {}
    for fqn, quantities in stats.items():
        for quantity, counts in quantities.items():
            total = sums.setdefault(f"{layer_group(fqn)}/{quantity}", {"saturated": 0, "flushed": 0, "numel": 0})
            for name in total:
                total[name] += int(counts[name])
    return {
        key: {"saturated": total["saturated"] / total["numel"], "flushed": total["flushed"] / total["numel"]}
        for key, total in sums.items()
        if total["numel"]
    }


class MetricsLog:
    """Records of a run in `folder/metrics.jsonl`, one JSON object a line, and as TensorBoard events in `folder/tensorboard`.

    A run that resumes at `step` drops the records after it, so that the file reads as if the run had never stopped. Numbers that
    are not finite are written as null, which is JSON. A full disk costs a warning and no step: the lines wait for the next flush, and
    the TensorBoard events end there.
    """

    def __init__(self, folder: Path, step: int = 0, tensorboard: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        _truncate(self.path, step)
        self._file = open(self.path, "ab", buffering=0)
        self._pending = b""
        self._board = _open_tensorboard(folder / "tensorboard", step) if tensorboard else None

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one record; it must have `step`."""
        self._pending += _line(record).encode()
        if self._board is not None:
            try:
                for name, value in _scalars(record):
                    self._board.add_scalar(name, value, record["step"])
            except OSError as error:
                self._end_board(error)

    def flush(self) -> None:
        """Hand all records to the operating system."""
        whole = self._file.tell()
        try:
            if self._pending and self._file.write(self._pending) < len(self._pending):
                raise OSError("No space left on device")
            self._pending = b""
        except OSError as error:
            self._file.truncate(whole)
            warnings.warn(f"{self.path} cannot be written now ({error}); its lines are kept in memory", stacklevel=2)

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                self._end_board(error)

    def _end_board(self, error: OSError) -> None:
        """Its thread is dead after the first failure."""
        self._board = None
        folder = self.path.with_name("tensorboard")
        warnings.warn(
            f"{folder} cannot be written ({error}): its events end here, {self.path.name} has all", stacklevel=3
        )


class Silent:
    """Takes the place of the metrics file and of the progress display on every rank but the first."""

    path = Path(os.devnull)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _nothing(self, *_: Any) -> None:
        pass

    write = flush = close = step = report = note = _nothing


def group_reduction(report: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """How gradients were reduced over ranks, by layer group: the smallest µ, the largest share of sums that reached the largest
    code in the last step, and the most steps in a row with µ at its floor (from `AutoScale.report`)."""
    groups: dict[str, dict[str, float]] = {}
    for fqn, entry in report.items():
        found = groups.setdefault(layer_group(fqn), dict(entry))
        found["mu"] = min(found["mu"], entry["mu"])
        for name in ("saturated", "floor_steps"):
            found[name] = max(found[name], entry[name])
    return groups


def gradient_stats(
    scales: Mapping[str, Tensor], report: Mapping[str, Mapping[str, float]], losses: Mapping[str, Loss]
) -> dict[str, dict[str, float]]:
    """Of each FP8 gradient by parameter: its `scale` and, with several ranks, `mu` and what the reduction lost in this step.

    `scales` are 0-d, read here, which waits for the device; `report` is that of `AutoScale`, `losses` those of `DataParallel.measure`:
    `snr_db` against an FP32 mean, `underflow` and `overflow`.
    """
    found = {name: {"scale": float(scale)} for name, scale in scales.items()}
    for name, entry in found.items():
        if name in report:
            entry["mu"] = report[name]["mu"]
        if name in losses:
            entry.update(dataclasses.asdict(losses[name]))
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a last line that a kill cut short is left out."""
    records = []
    with open(path) as file:
        for line in file:
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records


def smoothed_loss(records: list[dict[str, Any]]) -> float:
    """Mean training loss of the last tenth of the steps, skipped ones left out; NaN when there is none."""
    losses = [record["loss"] for record in records if "loss" in record]
    last = [loss for loss in losses[-max(1, round(len(losses) / 10)) :] if loss is not None]
    return sum(last) / len(last) if last else float("nan")


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _truncate(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.writelines(map(_line, kept))
    os.replace(temporary, path)


def _open_tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warnings.warn(
            "log.tensorboard is ignored: the tensorboard package is not installed (pip install '.[train]' in octavo's folder); "
            "metrics.jsonl has everything",
            stacklevel=3,
        )
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def _scalars(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    scalars: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            scalars += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "step":
            scalars.append((prefix + name, value))
    return scalars


def host_memory() -> int:
    """Resident bytes of this process, 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def device_memory(device: torch.device) -> int:
    """Peak bytes allocated on a GPU, resident bytes of the process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host_memory()
