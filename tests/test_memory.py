"""memory_report: every resident byte once, by kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.convert import initialize
from octavo.memory import KINDS, OTHER_KINDS, memory_report, plain_tensors
from octavo.recipe import O1, O2, RECIPES
from octavo.tensor import cast

N = 128 * 256 + 256 * 128
"""Parameters in converted layers of the model below."""


def trained(recipe, micro_batches: int = 1, dtype: torch.dtype = torch.float32):
    model = nn.Sequential(
        nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128), nn.BatchNorm1d(128)
    ).to(dtype)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), recipe)
    for _ in range(2):
        for _ in range(micro_batches):
            loss = model(torch.randn(16, 128, dtype=dtype, requires_grad=True)).square().sum()
            cache = memory_report(model, optimizer).by_kind["weight cache"]
            loss.backward()
        report = memory_report(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, report, cache


def test_O2_holds_six_bytes_per_parameter(seed):
    model, optimizer, report, cache = trained(O2)
    kinds = report.by_kind
    assert set(kinds) == set(KINDS + OTHER_KINDS)
    assert kinds["weights"] == 2 * N + 2 * 4
    assert kinds["gradients"] == N + 2 * 4
    # m in E4M3 with a scale for each 128, √v in FP16 with one, a step count
    assert kinds["optimizer states"] == 3 * N + 4 * N // 128 + 2 * (4 + 4)
    assert cache == 2 * N + 2 * (4 + 4)  # codes of both orders; a scale and its reciprocal
    assert (report.converted, report.parameters) == (N, N + 256 + 128 + 2 * 128 + 2 * 128)
    assert 6 < report.bytes_per_parameter < 6.05
    assert kinds["buffers"] == 2 * 128 * 4 + 8
    after = memory_report(model, optimizer)
    assert after.by_kind["weight cache"] == after.by_kind["gradients"] == after.by_kind["other gradients"] == 0
    assert after.total == sum(after.by_kind.values()) < report.total


@pytest.mark.parametrize(
    "name, dtype, expected",
    [
        ("O1", torch.float32, 4 + 1 + 8),
        ("O1", torch.bfloat16, 2 + 1 + 8),
        ("paper", torch.bfloat16, 6),
        ("paper-2b", torch.float32, 6),
        ("paper-3", torch.float32, 5),
        ("paper-4", torch.float32, 5),
    ],
)
def test_bytes_of_other_recipes(name, dtype, expected, seed):
    _, _, report, _ = trained(RECIPES[name], dtype=dtype)
    assert expected < report.bytes_per_parameter < expected + 0.01


def test_accumulated_gradients_have_a_residual(seed):
    for recipe in (O1, O2):
        _, _, report, _ = trained(recipe, micro_batches=2)
        assert report.by_kind["gradients"] == 2 * N + 2 * 4


def test_baseline_counts_as_other(seed):
    model, optimizer, report, _ = trained("bf16")
    assert report.converted == 0 and report.bytes_per_parameter == 0
    assert all(report.by_kind[kind] == 0 for kind in KINDS)
    total = report.parameters
    assert report.by_kind["other parameters"] == report.by_kind["other gradients"] == 4 * total
    assert report.by_kind["other states"] == 8 * total + 4 * len(optimizer.state)
    assert "B each" not in str(report) or "0.000" in str(report)


def test_tied_weights_and_views_count_once(seed):
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    model[1].weight = model[0].weight
    assert memory_report(model).by_kind["other parameters"] == 64 * 32 * 4
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert memory_report(meta).by_kind["other parameters"] == 2 * 8 * 8 * 4


def test_table_lines_up(seed):
    _, _, report, _ = trained(O2)
    lines = str(report).splitlines()
    assert len({len(line.rstrip()) for line in lines[:5]}) == 1
    assert lines[0].split() == ["kind", "MiB", "B/parameter"]
    assert lines[1].split()[-1] == "2.000"
    assert f"{N:,} of {report.parameters:,} parameters" in lines[-1]


def test_plain_tensors_of_nested_containers():
    x, scaled = torch.ones(3), cast(torch.ones(4), RECIPES["O2"].input)
    found = list(plain_tensors({"a": [x, (scaled, "text")], "b": None, "c": 3}))
    assert [t.dtype for t in found] == [torch.float32, torch.float8_e4m3fn, torch.float32]
