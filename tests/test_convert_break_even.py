"""The break-even rule: measured shapes decide, nothing is guessed, and a user can overrule it."""

from __future__ import annotations

import copy
import csv
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo.convert import BreakEven, break_even, convert, convert_report, initialize
from octavo.convert.break_even import BLOCK, LAYER, Measurement, Table, deciding_by, find_table, read_tables
from octavo.linear import FP8Conv1D, FP8Linear
from octavo.models import SIZES, Transformer
from octavo.optim import AdamW

TOKENS, SIDES = (64, 1024), (32, 64, 128, 256)
BREAK_EVEN = {"eager": 128, "graph": 64}


def times(mode: str, tokens: int, inputs: int, outputs: int) -> tuple[float, float]:
    """A device on which FP8 wins from a geometric mean of the sides of `BREAK_EVEN` on, and sooner with more tokens."""
    side = (inputs * outputs) ** 0.5
    bf16 = 10 + tokens * inputs * outputs / 1e3
    return bf16, bf16 * (BREAK_EVEN[mode] / side) ** 0.5 * (TOKENS[0] / tokens) ** 0.1


def measurements(capability: str = "cpu") -> list[Measurement]:
    return [
        Measurement(
            capability, "a device", mode, tokens, side, aspect * side, *times(mode, tokens, side, aspect * side)
        )
        for mode in BREAK_EVEN
        for tokens in TOKENS
        for side in SIDES
        for aspect in (1, 4)
    ]


def write(path: Path, rows: list[Measurement]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*vars(rows[0]), "date"])
        writer.writerows([*vars(row).values(), "today"] for row in rows)
    return path


@pytest.fixture
def table(tmp_path) -> Path:
    """A table of this CPU."""
    return write(tmp_path / "table.csv", measurements())


BLOCKS = {
    ("eager", 64, 64, 256): 0.5,
    ("eager", 64, 64, 352): 0.6,
    ("eager", 64, 128, 512): 1.5,
    ("eager", 64, 128, 704): 0.9,
    ("compiled", 64, 64, 256): 1.25,
    ("compiled", 64, 64, 352): 0.8,
    ("compiled", 64, 128, 512): 1.75,
    ("compiled", 64, 128, 704): 1.1,
}
"""Speedups of blocks in two dialects, by mode, tokens, dim and features of the widest layer."""


def blocks(capability: str = "cpu") -> list[Measurement]:
    return [
        Measurement(capability, "a device", *shape, bf16_us=speedup, fp8_us=1, what=BLOCK)
        for shape, speedup in BLOCKS.items()
    ]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))


def converted(model: nn.Module) -> list[str]:
    return [layer.fqn for layer in convert_report(model) if layer.converted]


def reasons(model: nn.Module) -> dict[str, str]:
    return {layer.fqn: layer.reason for layer in convert_report(model) if not layer.converted}


# --- the table


def test_measured_points_are_given_back(table):
    (read,) = read_tables(table).values()
    for one in measurements():
        assert read.speedup(one.tokens, one.inputs, one.outputs, one.mode) == pytest.approx(one.bf16_us / one.fp8_us)
        assert read.speedup(one.tokens, one.outputs, one.inputs, one.mode) == pytest.approx(one.bf16_us / one.fp8_us)


def test_between_points_the_speedup_is_a_power_law_and_beyond_them_that_of_the_edge(table):
    (read,) = read_tables(table).values()
    for mode in BREAK_EVEN:
        for tokens, inputs, outputs in ((64, 96, 96), (256, 64, 128), (200, 90, 250), (1024, 128, 256)):
            bf16, fp8 = times(mode, tokens, inputs, outputs)
            assert read.speedup(tokens, inputs, outputs, mode) == pytest.approx(bf16 / fp8)
        edge = read.speedup(1024, 256, 256, mode)
        assert read.speedup(1 << 20, 1 << 14, 1 << 14, mode) == edge
        assert read.speedup(1, 8, 8, mode) == read.speedup(64, 32, 32, mode)
        assert read.speedup(64, 32, 32 * 64, mode) == read.speedup(64, 128, 512, mode)  # the aspect stops at 4


def test_where_square_layers_begin_to_be_faster(table):
    (read,) = read_tables(table).values()
    assert read.smallest(64, "eager") == 128 and read.smallest(64, "graph") == 64
    assert read.describe()[0] == "square layers, eager: at 64 tokens from d = 128, at 1,024 tokens from d = 128"
    slower = Table(tuple(one for one in read.measurements if one.inputs < 64))
    assert slower.smallest(64, "eager") is None and "at 64 tokens never" in slower.describe()[0]


def test_a_mode_that_was_not_measured_takes_the_other():
    table = Table(tuple(one for one in measurements() if one.mode == "eager"))
    assert table.speedup(64, 64, 64, "graph") == table.speedup(64, 64, 64, "eager")


def test_layers_and_blocks_have_grids_of_their_own(tmp_path):
    (both,) = read_tables(write(tmp_path / "both.csv", measurements() + blocks())).values()
    layers, only_blocks = Table(tuple(measurements())), Table(tuple(blocks()))
    assert both.modes() == ["eager", "graph"] and both.modes(BLOCK) == ["compiled", "eager"]
    assert both.tokens() == [64, 1024] and both.tokens(BLOCK) == [64]
    for (mode, *shape), speedup in BLOCKS.items():
        assert both.speedup(*shape, mode, BLOCK) == pytest.approx(speedup)
        assert both.speedup(*shape, mode) == layers.speedup(*shape, mode)
        assert layers.speedup(*shape, mode, BLOCK) is None and only_blocks.speedup(*shape, mode, LAYER) is None


def test_where_blocks_of_both_dialects_begin_to_be_faster():
    table = Table(tuple(measurements() + blocks()))
    assert table.smallest(64, "compiled", BLOCK) == 128 and table.smallest(64, "eager", BLOCK) is None
    assert table.describe() == Table(tuple(measurements())).describe() + [
        "blocks, compiled: at 64 tokens from d = 128",
        "blocks, eager: at 64 tokens never",
    ]


def test_a_file_without_the_column_what_is_of_layers(tmp_path, table):
    path = tmp_path / "old.csv"
    with table.open(newline="") as file, path.open("w", newline="") as old:
        rows = list(csv.DictReader(file))
        writer = csv.DictWriter(old, [name for name in rows[0] if name != "what"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    assert read_tables(path) == read_tables(table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("capability,mode\n", "no column 'device'"),
        ("capability,device,mode,tokens,inputs,outputs,bf16_us,fp8_us\n9.0,x,eager,64,32,many,1,1\n", "line 2.*many"),
        ("capability,device,mode,tokens,inputs,outputs,bf16_us,fp8_us\n9.0,x,eager,64,32,32,1,0\n", "line 2.*positive"),
        ("capability,device,mode,tokens,inputs,outputs,bf16_us,fp8_us\n9.0,x,eager\n", "line 2"),
        (
            "capability,device,mode,tokens,inputs,outputs,bf16_us,fp8_us,what\n9.0,x,eager,64,32,32,1,1,model\n",
            "line 2.*'model': use layer or block",
        ),
    ],
)
def test_a_file_that_is_no_table(tmp_path, text, message):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        convert(mlp(), break_even=BreakEven(table=path))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="octavo bench --break-even"):
        convert(mlp(), break_even=BreakEven(table=tmp_path / "none.csv"))
    for tokens in (0, "many"):
        with pytest.raises(ValueError, match=f"tokens={tokens!r}"):
            BreakEven(tokens=tokens)


# --- what convert does with it


def test_layers_are_decided_one_by_one_and_the_reason_has_the_figures(table, seed):
    model = mlp()
    convert(model, "O2", break_even=BreakEven(tokens=64, table=table))
    assert converted(model) == ["2", "4"]
    reason = reasons(model)["0"]
    bf16, fp8 = times("eager", 64, 64, 64)
    for words in (
        f"{bf16 / fp8:.3g}× the speed",
        "64 tokens, 64 → 64",
        "eager",
        "compute capability cpu",
        "break_even=False",
    ):
        assert words in reason, reason
    x = torch.randn(8, 64)
    model(x).sum().backward()
    assert type(model[0]) is nn.Linear and type(model[0].weight.grad) is torch.Tensor


def test_tokens_and_mode_count(table, seed):
    def taken(**settings):
        return converted(
            convert(
                nn.Sequential(nn.Linear(120, 120), nn.Linear(256, 256)), break_even=BreakEven(table=table, **settings)
            )
        )

    assert taken(tokens=64) == ["1"]
    assert taken(tokens=1024) == ["0", "1"]
    assert taken(tokens=64, compiled=True) == ["0", "1"]


def test_a_measured_block_decides_for_its_layers(tmp_path, seed):
    """Whatever they are on their own; a layer outside is judged for itself."""
    path = write(tmp_path / "both.csv", measurements() + blocks())
    for compiled, mode in ((False, "eager"), (True, "compiled")):
        for together in (((64, 192), (64, 64), (64, 256), (256, 64)), ((64, 192), (64, 64), (64, 352), (176, 64))):
            rule, alone = BreakEven(64, compiled, path, together), BreakEven(64, compiled, path)
            widest = together[2][1]
            want = BLOCKS[mode, 64, 64, widest]
            for shape in together:
                assert rule.speedup(*shape, "cpu") == pytest.approx(want)
            assert rule.speedup(32, 64, "cpu") == alone.speedup(32, 64, "cpu")
            reason = rule(64, 64, torch.device("cpu"))
            assert (reason is None) == (want >= 1)
            assert reason is None or f"a fused block whose widest layer is 64 → {widest}, {mode}" in reason
            model = convert(
                nn.Sequential(*(nn.Linear(*shape) for shape in together), nn.Linear(256, 256)), break_even=rule
            )
            assert converted(model) == [*("0123" if want >= 1 else ""), "4"]


def test_a_table_of_blocks_alone_does_not_judge_layers(tmp_path, seed):
    path = write(tmp_path / "blocks.csv", blocks())
    rule = BreakEven(64, table=path, together=((64, 64), (64, 256)))
    assert rule.speedup(64, 64, "cpu") == pytest.approx(0.5) and rule.speedup(32, 32, "cpu") is None
    model = convert(nn.Sequential(nn.Linear(64, 256), nn.Linear(32, 32)), break_even=rule)
    assert converted(model) == ["1"]


def test_a_table_of_blocks_alone_judges_those_in_a_graph_by_what_it_has(tmp_path):
    """A file of `--only block` from before blocks were measured in graphs."""
    path = write(tmp_path / "blocks.csv", blocks())
    together = ((64, 64), (64, 256))
    in_graph, compiled = (
        BreakEven(64, table=path, together=together, **way) for way in ({"graph": True}, {"compiled": True})
    )
    assert (
        in_graph.speedup(64, 64, "cpu")
        == compiled.speedup(64, 64, "cpu")
        == pytest.approx(BLOCKS["compiled", 64, 64, 256])
    )


def test_layers_of_a_fused_block_go_together(table, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 256))
    together = ((64, 64), (256, 256))
    rule = BreakEven(tokens=64, table=table, together=together)
    slow, fast = (bf16 / fp8 for bf16, fp8 in (times("eager", 64, *shape) for shape in together))
    total = (64**2 + 256**2) / (64**2 / slow + 256**2 / fast)
    assert slow < 1 < total < fast
    for shape in together:
        assert rule.speedup(*shape, "cpu") == pytest.approx(total)
    slower = BreakEven(tokens=64, table=table, together=((64, 64), (64, 65)))(64, 64, torch.device("cpu"))
    assert slower is not None and "a fused block, by its layers 64 → 64, 64 → 65, eager" in slower
    assert converted(convert(model, break_even=rule)) == ["0", "1", "2"]


def test_weights_stored_the_other_way(table, seed):
    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    model = nn.Sequential(Conv1D(96, 32), Conv1D(256, 256))
    convert(model, break_even=BreakEven(tokens=64, table=table))
    assert "32 → 96" in reasons(model)["0"] and isinstance(model[1], FP8Conv1D)


def test_devices_that_were_not_measured_are_not_judged(tmp_path, seed):
    path = write(tmp_path / "other.csv", measurements("9.0"))
    assert converted(convert(mlp(), break_even=BreakEven(tokens=64, table=path))) == ["0", "2", "4"]
    assert find_table("meta", path) is None
    assert converted(convert(mlp())) == ["0", "2", "4"]
    assert find_table("cpu") is None, "octavo's own table must not judge CPUs"


def test_a_filter_or_false_converts_all_the_same(table, seed):
    rule = BreakEven(tokens=64, table=table)
    with deciding_by(rule):
        assert converted(convert(mlp())) == ["2", "4"]
        assert converted(convert(mlp(), break_even=False)) == ["0", "2", "4"]
        assert converted(convert(mlp(), filter=lambda module, fqn: True)) == ["0", "2", "4"]
        assert converted(convert(mlp(), break_even=BreakEven(tokens=64, compiled=True, table=table))) == ["0", "2", "4"]
    assert converted(convert(mlp())) == ["0", "2", "4"]


def test_converting_again_keeps_the_decision_unless_another_is_given(table, seed):
    model = convert(mlp(), "O2", break_even=BreakEven(tokens=64, table=table))
    convert(model, "O2")
    optimizer = AdamW(model.parameters(), recipe="O2")
    initialize(model, optimizer, "O2")
    assert converted(model) == ["2", "4"]
    assert converted(convert(copy.deepcopy(model), "O2")) == ["2", "4"]
    convert(model, "O2", break_even=False)
    assert converted(model) == ["0", "2", "4"]


def test_what_the_filter_refused_stays_refused(table, seed):
    model = convert(mlp(), "O2", filter=lambda module, fqn: fqn == "2")
    convert(model, "O2", break_even=False)
    assert converted(model) == ["2"]


def test_no_layer_at_all_is_a_warning_and_a_model_that_trains(table, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="'O2' converts no layer.*break_even=False") as caught:
        model, optimizer = initialize(model, optimizer, "O2", break_even=BreakEven(tokens=64, table=table))
    assert [warning.filename for warning in caught] == [__file__]
    assert isinstance(optimizer, octavo.AdamW) and converted(model) == []
    x = torch.randn(8, 64)
    assert torch.equal(model(x), plain(x))
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, plain[0].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(mlp(), break_even=BreakEven(tokens=64, table=table))
    with pytest.raises(ValueError, match="convert no layer"):
        convert(nn.Sequential(nn.Linear(64, 8)), break_even=BreakEven(tokens=64, table=table))


def test_layers_left_where_nobody_told_how_the_model_runs_are_a_warning(table, seed, monkeypatch):
    monkeypatch.setattr(break_even, "MEASURED", table)
    with deciding_by(BreakEven()):
        with pytest.warns(
            UserWarning, match=r"1 of 3 linear layers stay.* first 0: .*eager.*BreakEven\(tokens=..., compiled=True\)"
        ) as caught:
            assert converted(convert(mlp())) == ["2", "4"]
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert converted(convert(mlp(), break_even=BreakEven(compiled=True))) == ["0", "2", "4"]
            convert(mlp(), break_even=BreakEven())


def test_what_is_no_rule_is_refused(seed):
    with pytest.raises(TypeError, match="break_even is 4096.*BreakEven"):
        convert(mlp(), break_even=4096)
    with pytest.raises(TypeError, match="break_even"):
        initialize(mlp(), break_even="auto")


def test_a_model_that_converts_while_it_is_built(table, seed):
    """Every block decides alike, and the conversion of the whole model does not decide again."""
    with deciding_by(BreakEven(tokens=64, table=table)):
        model = Transformer.build(SIZES["tiny"], "O2")
    names = [name for name, module in model.named_modules() if isinstance(module, FP8Linear)]
    kinds = {name.split(".", 2)[2] for name in names}
    assert 0 < len(names) == len(kinds) * SIZES["tiny"].n_layers and "attention.out" not in kinds
    convert(model, "O2")
    assert [name for name, module in model.named_modules() if isinstance(module, FP8Linear)] == names


def test_octavos_own_table_if_there_is_one_is_whole():
    if break_even.MEASURED.is_file():
        for table in read_tables(break_even.MEASURED).values():
            assert table.modes() == ["eager", "graph"] and table.modes(BLOCK) in ([], ["compiled", "eager"])
            points = {(m.what, m.mode, m.tokens, m.inputs, m.outputs) for m in table.measurements}
            assert len(points) == len(table.measurements)
