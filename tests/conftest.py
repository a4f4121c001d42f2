"""Fixtures and marks shared by all tests.

Inputs are fresh at each run: a test that takes the `seed` fixture gets a new seed, which pytest shows when the test fails;
`pytest --seed N` repeats it. Tests marked `gpu` need CUDA and `multigpu` two devices; elsewhere they are skipped.
"""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Iterator

import numpy
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="seed of the random inputs; default: a fresh one for each test"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for mark, needed in (("gpu", 1), ("multigpu", 2)):
        if devices < needed:
            skip = pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {devices}")
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(skip)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed, already given to torch, numpy and random; printed so that a failure can be repeated."""
    value = request.config.getoption("--seed")
    if value is None:
        value = secrets.randbelow(2**31)
    print(f"seed {value} (repeat with: pytest --seed {value})")
    torch.manual_seed(value)
    numpy.random.seed(value)
    random.seed(value)
    return value


@pytest.fixture(autouse=True)
def all_shapes_are_converted() -> Iterator[None]:
    """Layers as small as those of tests become FP8, also on a GPU that was measured: what decides by speed asks for it."""
    from octavo.convert.break_even import deciding_by

    with deciding_by(None):
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Functions compiled by one test do not count towards the limit of recompilations of the next."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
