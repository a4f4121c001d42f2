"""Records are exact, resumable and honest: MFU only against a named peak, nothing lost to a full disk."""

from __future__ import annotations

import builtins
import json
import math
import random
from pathlib import Path

import pytest
import torch

from octavo.distributed.samples import Loss
from octavo.train import metrics
from octavo.train.metrics import (
    MetricsLog,
    gradient_stats,
    group_stats,
    layer_group,
    peak_of,
    read_metrics,
    smoothed_loss,
    throughput,
)


@pytest.mark.parametrize(
    ("device", "bf16", "fp8"),
    [
        ("NVIDIA H200", 989, 1979),
        ("NVIDIA H100 80GB HBM3", 989, 1979),
        ("NVIDIA H100 PCIe", 756, 1513),
        ("NVIDIA H100 NVL", 835, 1671),
        ("NVIDIA A100-SXM4-80GB", 312, None),
    ],
)
def test_peak_is_the_datasheet_of_the_named_gpu(device: str, bf16: float, fp8: float | None) -> None:
    peak = peak_of(device)
    assert peak is not None and (peak.bf16, peak.fp8) == (bf16, fp8)


def test_no_mfu_without_a_known_peak() -> None:
    assert peak_of("cpu") is None and peak_of("NVIDIA Next 9000") is None
    assert set(throughput(1000, 1.0, 1e9, None)) == {"tokens_per_s", "tflops"}


def test_throughput_against_both_peaks() -> None:
    record = throughput(tokens=50_000, seconds=0.5, flops_per_token=6e9, peak=peak_of("NVIDIA H200"))
    assert record["tokens_per_s"] == 100_000 and record["tflops"] == pytest.approx(600)
    assert record["mfu_bf16"] == pytest.approx(600 / 989) and record["mfu_fp8"] == pytest.approx(600 / 1979)


def test_layers_of_all_blocks_make_one_group() -> None:
    assert layer_group("blocks.11.attention.qkv") == layer_group("blocks.0.attention.qkv") == "attention.qkv"
    assert layer_group("head") == "head"
    assert layer_group("experts.3") == "experts.3"


def test_group_stats_are_shares_of_the_whole_group() -> None:
    counts = [{"saturated": 1, "flushed": 0, "numel": 100}, {"saturated": 2, "flushed": 50, "numel": 300}]
    shares = group_stats({f"blocks.{i}.up": {"input": counts[i]} for i in range(2)})
    assert shares == {"up/input": {"saturated": 3 / 400, "flushed": 50 / 400}}


def test_records_are_exact_and_resume_drops_later_ones(tmp_path: Path) -> None:
    losses = [random.random() * 10 for _ in range(20)]
    log = MetricsLog(tmp_path, tensorboard=False)
    for step, loss in enumerate(losses, 1):
        log.write({"step": step, "loss": loss})
    log.close()
    whole = log.path.read_bytes()
    assert [record["loss"] for record in read_metrics(log.path)] == losses

    log = MetricsLog(tmp_path, step=12, tensorboard=False)
    for step, loss in list(enumerate(losses, 1))[12:]:
        log.write({"step": step, "loss": loss})
    log.close()
    assert log.path.read_bytes() == whole


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    log = MetricsLog(tmp_path, step=1, tensorboard=False)
    log.write({"step": 2, "loss": 1.5})
    log.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_non_finite_numbers_are_null_in_the_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    log.write({"step": 1, "loss": math.nan, "memory": {"weights": math.inf}})
    log.close()
    assert json.loads(log.path.read_text()) == {"step": 1, "loss": None, "memory": {"weights": None}}


def test_full_disk_warns_and_keeps_the_lines(tmp_path: Path) -> None:
    class Full:
        """A file on a disk with room for three bytes."""

        def __init__(self, file) -> None:  # noqa: ANN001
            self.file, self.tell, self.truncate = file, file.tell, file.truncate

        def write(self, data: bytes) -> int:
            return self.file.write(data[:3])

    log = MetricsLog(tmp_path, tensorboard=False)
    log.write({"step": 1, "loss": 1.0})
    log.flush()
    real, log._file = log._file, Full(log._file)  # type: ignore[assignment]
    log.write({"step": 2, "loss": 0.5})
    with pytest.warns(UserWarning, match="No space left"):
        log.flush()
    assert [record["step"] for record in read_metrics(log.path)] == [1]
    log._file = real
    log.close()
    assert [record["step"] for record in read_metrics(log.path)] == [1, 2]


def test_full_disk_ends_the_events_of_tensorboard_and_nothing_else(tmp_path: Path) -> None:
    class Full:
        def add_scalar(self, *_: object) -> None:
            raise OSError("No space left on device")

        close = add_scalar

    log = MetricsLog(tmp_path, tensorboard=False)
    log._board = Full()
    with pytest.warns(UserWarning, match="tensorboard cannot be written .*No space left.*metrics.jsonl has all"):
        log.write({"step": 1, "loss": 1.0})
    log.write({"step": 2, "loss": 0.5})
    log._board = Full()
    with pytest.warns(UserWarning, match="tensorboard cannot be written"):
        log.close()
    assert [record["step"] for record in read_metrics(log.path)] == [1, 2]


def test_smoothed_loss_is_the_mean_of_the_last_tenth_without_skipped_steps() -> None:
    records = [{"step": step, "loss": float(step)} for step in range(1, 101)]
    assert smoothed_loss(records) == sum(range(91, 101)) / 10
    records[-1]["loss"] = None
    assert smoothed_loss(records) == sum(range(91, 100)) / 9
    assert math.isnan(smoothed_loss([]))


def test_tensorboard_events(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(tmp_path)
    for step in range(1, 4):
        log.write({"step": step, "loss": step / 4, "memory": {"weights": 2}})
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == [0.25, 0.5, 0.75]
    assert len(events.Scalars("memory/weights")) == 3


def test_missing_tensorboard_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_tensorboard(name: str, *arguments, **keywords):  # noqa: ANN002, ANN003, ANN202
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.warns(UserWarning, match="log.tensorboard is ignored") as caught:
        log = MetricsLog(tmp_path)
        log.write({"step": 1, "loss": 1.0})
        log.close()
    assert len(caught) == 1


def test_gradient_stats_have_what_is_known_of_each_gradient() -> None:
    scales = {"a": torch.tensor(4.0), "b": torch.tensor(0.5)}
    assert gradient_stats(scales, {}, {}) == {"a": {"scale": 4.0}, "b": {"scale": 0.5}}
    report = {"a": {"mu": 0.25, "saturated": 0.1, "floor_steps": 0}}
    found = gradient_stats(scales, report, {"a": Loss(27.0, 0.01, 0.002)})
    assert found["a"] == {"scale": 4.0, "mu": 0.25, "snr_db": 27.0, "underflow": 0.01, "overflow": 0.002}
    assert found["b"] == {"scale": 0.5}


def test_memory_of_this_process_is_known() -> None:
    assert metrics.host_memory() > 1e6
