"""Steps come out as they went in, in one transfer, and skipped ones are counted in total and in a row."""

from __future__ import annotations

import torch

from octavo.train.ledger import StepLedger


def add(ledger: StepLedger, step: int, loss: float, counter: int) -> None:
    ledger.add(
        step, 0.1 * step, torch.tensor(loss), torch.tensor(2.0 * loss, dtype=torch.float64), torch.tensor(counter)
    )


def test_numbers_are_exact_and_in_order(seed: int) -> None:
    losses = torch.rand(5).tolist()
    ledger = StepLedger()
    for step, loss in enumerate(losses, 1):
        add(ledger, step, loss, 0)
    steps = ledger.read()
    assert [numbers.loss for numbers in steps] == losses
    assert [numbers.step for numbers in steps] == [1, 2, 3, 4, 5]
    assert [numbers.lr for numbers in steps] == [0.1 * step for step in range(1, 6)]
    assert ledger.read() == []


def test_skipped_steps_over_several_reads() -> None:
    ledger = StepLedger(skipped=7, in_a_row=2)
    for step, counter in enumerate((1, 2), 1):
        add(ledger, step, float("nan"), counter)
    assert [(numbers.skipped, numbers.in_a_row) for numbers in ledger.read()] == [(8, 3), (9, 4)]
    for step, counter in enumerate((2, 3, 3), 3):
        add(ledger, step, 1.0, counter)
    assert [(numbers.skipped, numbers.in_a_row) for numbers in ledger.read()] == [(9, 0), (10, 1), (10, 0)]


def test_add_does_not_read() -> None:
    """On the meta device any read fails, as it would make the host wait on a GPU."""
    meta = torch.empty((), device="meta")
    StepLedger().add(1, 0.1, meta, meta, meta)
