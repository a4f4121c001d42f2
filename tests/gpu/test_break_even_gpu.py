"""The break-even of a GPU: layers and blocks measured eager and in a CUDA graph, blocks compiled too, and both obeyed on that GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.bench import break_even, break_even_blocks
from octavo.cli import main
from octavo.convert import BreakEven, convert, convert_report
from octavo.convert.break_even import BLOCK, LAYER, capability_of, find_table

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:recipe 'O2' converts no layer")
def test_what_is_measured_decides(monkeypatch, tmp_path, seed):
    monkeypatch.setitem(break_even.TOKENS, "cuda", (256, 4096))
    monkeypatch.setitem(break_even.SIDES, "cuda", (256, 2048))
    monkeypatch.setitem(break_even_blocks.TOKENS, "cuda", (4096, 8192))
    monkeypatch.setitem(break_even_blocks.DIMS, "cuda", (512,))
    path = tmp_path / "table.csv"
    assert main(["bench", "--device", "cuda", "--break-even", str(path)]) == 0
    table = find_table(capability_of(torch.device("cuda")), path)
    assert (
        table is not None
        and table.modes() == ["eager", "graph"]
        and table.modes(BLOCK) == ["compiled", "eager", "graph"]
    )
    assert [one.what for one in table.measurements] == [LAYER] * 16 + [BLOCK] * 12
    for one in table.measurements:
        together = ((one.inputs, one.inputs), (one.inputs, one.outputs)) if one.what == BLOCK else ()
        rule = BreakEven(one.tokens, one.mode == "compiled", path, together, one.mode == "graph")
        layer = nn.Sequential(nn.Linear(one.inputs, one.outputs, device="cuda", dtype=torch.bfloat16))
        convert(layer, break_even=rule)
        assert convert_report(layer)[0].converted == (one.speedup >= 1)


def test_a_layer_on_the_cpu_is_not_judged_by_the_table_of_a_gpu(seed):
    assert convert_report(convert(nn.Sequential(nn.Linear(64, 64)), break_even=BreakEven(tokens=1)))[0].converted
