"""Figures are written, whole curves are drawn and skipped steps leave gaps in nothing but themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.train.plots import _running_mean, loss_curve, plot_losses, plot_memory, plot_mu

pytest.importorskip("matplotlib")


def test_running_mean_is_as_long_as_its_data_and_keeps_constants() -> None:
    for length in (1, 2, 7, 100):
        for window in (1, 2, 5, 12):
            assert np.allclose(_running_mean(np.full(length, 3.0), window), np.full(length, 3.0))
    values = np.random.default_rng().normal(size=50)
    assert np.isclose(_running_mean(values, 5)[20], values[18:23].mean())


def test_figures_are_written(tmp_path: Path) -> None:
    steps = range(1, 60)
    curves = {name: [(step, 5 / step + shift) for step in steps] for name, shift in (("bf16", 0.0), ("O2", 0.01))}
    curves["O2"][5] = (6, None)
    plot_losses(tmp_path / "new" / "loss.png", curves, "bf16", "title", {"bf16": 1.0})
    plot_memory(tmp_path / "memory.png", {"bf16": {"weights": 4.0}, "O2": {"weights": 2.0, "moments": 3.0}}, "title")
    for path in (tmp_path / "new" / "loss.png", tmp_path / "memory.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_one_point_is_a_curve(tmp_path: Path) -> None:
    plot_losses(tmp_path / "loss.png", {"bf16": [(1, 2.0)], "O2": [(1, 2.1)]}, "bf16", "title")


def test_loss_curve_takes_training_records_only() -> None:
    assert loss_curve([{"step": 1, "loss": 2.0}, {"step": 1, "val_loss": 3.0}]) == [(1, 2.0)]


def test_mu_is_drawn_and_missed(tmp_path: Path) -> None:
    def entry(step: int) -> dict[str, float]:
        return {"mu": 2.0**-step, "saturated": 0.0 if step % 2 else 1e-3, "floor_steps": 0}

    records = [
        {"step": step, "reduction": {f"blocks.{i}": entry(step) for i in range(min(step, 20))}} for step in range(1, 30)
    ]
    plot_mu(tmp_path / "mu.png", [{"step": 1, "loss": 3.0}, *records], "title")
    assert (tmp_path / "mu.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no µ"):
        plot_mu(tmp_path / "none.png", [{"step": 1, "loss": 3.0}], "title")
