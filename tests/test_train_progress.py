"""A terminal gets a bar, anything else plain lines without control characters."""

from __future__ import annotations

import sys

import pytest

from octavo.train.progress import Progress


def use(progress: Progress) -> None:
    with progress:
        for step in range(3, 7):
            progress.step(step)
        progress.report(6, loss=2.5, tokens_per_s=12345.6, memory=3 * 2**30, skipped=2, mfu=0.41)
        progress.note("validation loss [2.25]")


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    use(Progress("demo O2", 10, start=2))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    for word in (
        "demo O2",
        "step 6/10",
        "loss 2.5000",
        "12,346 tokens/s",
        "3.00 GiB",
        "41.0% of BF16",
        "2 skipped",
        "left",
    ):
        assert word in lines[0]
    assert lines[1].endswith("validation loss [2.25]")


def test_terminal_shows_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    use(Progress("demo O2", 10, start=2))
    out = capsys.readouterr().out
    assert "demo O2" in out and "validation loss [2.25]" in out
