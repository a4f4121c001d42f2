"""The break-even of a GPU: measured eager and in a CUDA graph, and obeyed by layers on that GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.bench import break_even
from octavo.cli import main
from octavo.convert import BreakEven, convert, convert_report
from octavo.convert.break_even import capability_of, find_table

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:recipe 'O2' converts no layer")
def test_what_is_measured_decides(monkeypatch, tmp_path, seed):
    monkeypatch.setitem(break_even.TOKENS, "cuda", (256, 4096))
    monkeypatch.setitem(break_even.SIDES, "cuda", (256, 2048))
    path = tmp_path / "table.csv"
    assert main(["bench", "--device", "cuda", "--break-even", str(path)]) == 0
    table = find_table(capability_of(torch.device("cuda")), path)
    assert table is not None and table.modes == ["eager", "graph"] and len(table.measurements) == 16
    for one in table.measurements:
        rule = BreakEven(tokens=one.tokens, compiled=one.mode == "graph", table=path)
        layer = nn.Sequential(nn.Linear(one.inputs, one.outputs, device="cuda", dtype=torch.bfloat16))
        convert(layer, break_even=rule)
        assert convert_report(layer)[0].converted == (table.speedup(one.tokens, one.inputs, one.outputs, one.mode) >= 1)


def test_a_layer_on_the_cpu_is_not_judged_by_the_table_of_a_gpu(seed):
    assert convert_report(convert(nn.Sequential(nn.Linear(64, 64)), break_even=BreakEven(tokens=1)))[0].converted
