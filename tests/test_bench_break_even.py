"""`octavo bench --break-even` writes the table that `convert`, the trainer and the plan decide by."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest
import torch
from fp8_layers import count_casts
from torch import nn

from octavo.bench import break_even, break_even_blocks, linear, models
from octavo.bench.rows import Record
from octavo.bench.run import Run
from octavo.cli import main
from octavo.convert import BreakEven, convert, convert_report
from octavo.convert.break_even import BLOCK, LAYER, find_table, read_tables
from octavo.models import SIZES
from octavo.models import fused as fused_models
from octavo.plan import GPUS, Setup, make_plan
from octavo.recipe import RECIPES
from octavo.settings import override
from octavo.train.presets import get_preset

HEADER = "capability,device,mode,tokens,inputs,outputs,bf16_us,fp8_us"


def write_table(path, capability, modes=("eager",), square=0.5, wide=1.5):
    """Speedups of square layers, and of layers four times as wide."""
    rows = [
        f"{capability},a device,{mode},1024,64,{outputs},1,{1 / speed}"
        for mode in modes
        for outputs, speed in ((64, square), (256, wide))
    ]
    path.write_text("\n".join([HEADER, *rows]))
    return path


@pytest.fixture
def small(monkeypatch) -> None:
    """Two numbers of tokens and two widths of each kind."""
    monkeypatch.setitem(break_even.TOKENS, "cpu", (16, 64))
    monkeypatch.setitem(break_even.SIDES, "cpu", (32, 48))
    monkeypatch.setitem(break_even_blocks.TOKENS, "cpu", (32, 64))
    monkeypatch.setitem(break_even_blocks.SEQ_LEN, "cpu", 16)


@pytest.mark.filterwarnings("ignore:recipe 'O2' converts no layer")
def test_the_command_writes_a_table_that_decides(small, tmp_path, capsys, seed):
    path = tmp_path / "table.csv"
    assert main(["bench", "--device", "cpu", "--break-even", str(path)]) == 0
    out = capsys.readouterr().out
    assert "layer     64 tokens,   48 → 192" in out and "square layers, eager: at 16 tokens" in out
    assert "block     64 tokens,  128 → 704" in out and "blocks, eager: at 32 tokens" in out
    with path.open() as file:
        rows = list(csv.DictReader(file))
    kinds = [row["what"] for row in rows]
    assert (
        kinds == [LAYER] * 8 + [BLOCK] * 8
        and {row["torch"] for row in rows} == {torch.__version__}
        and all(row["date"] for row in rows)
    )
    table = find_table("cpu", path)
    assert table is not None and table.tokens() == [16, 64] and table.tokens(BLOCK) == [32, 64]
    for row in rows:
        tokens, inputs, outputs = int(row["tokens"]), int(row["inputs"]), int(row["outputs"])
        speedup = float(row["bf16_us"]) / float(row["fp8_us"])
        assert table.speedup(tokens, inputs, outputs, "eager", row["what"]) == pytest.approx(speedup)
        model = nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(8192, 64))
        together = ((inputs, inputs), (inputs, outputs)) if row["what"] == BLOCK else ()
        convert(model, break_even=BreakEven(tokens=tokens, table=path, together=together))
        assert convert_report(model)[0].converted == (speedup >= 1)


@pytest.mark.parametrize("what", [LAYER, BLOCK])
def test_one_of_the_two_alone(what, small, tmp_path, capsys, seed):
    path = tmp_path / "table.csv"
    assert main(["bench", "--device", "cpu", "--break-even", str(path), "--only", what]) == 0
    assert {one.what for one in read_tables(path)["cpu"].measurements} == {what}


def test_a_wrong_block_or_one_that_does_not_fit_is_left_out(small, monkeypatch, tmp_path, capsys, seed):
    right = break_even_blocks.BlockPair.time

    def time(pair, tokens, mode):
        if pair.dialect == "gpt":
            raise torch.OutOfMemoryError("full")
        bf16, fp8 = right(pair, tokens, mode)
        return bf16, replace(fp8, error=0.5) if tokens == 64 else fp8

    monkeypatch.setattr(break_even_blocks.BlockPair, "time", time)
    path = tmp_path / "table.csv"
    assert main(["bench", "--device", "cpu", "--break-even", str(path), "--only", "block"]) == 1
    table = find_table("cpu", path)
    assert table is not None
    assert [(m.tokens, m.inputs, m.outputs) for m in table.measurements] == [(32, 64, 352), (32, 128, 704)]
    out = capsys.readouterr().out
    assert "WRONG: 64 tokens, llama block of 128" in out and "128 → 512  , eager: out of memory" in out


@pytest.mark.parametrize("dialect", ["gpt", "llama"])
def test_a_block_is_compiled_once_for_all_numbers_of_tokens(dialect, small, monkeypatch, seed):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compiler(*args, **options, backend="aot_eager"))
    monkeypatch.setitem(break_even_blocks.MODES, "cpu", ("eager", "compiled"))
    run = Run(torch.device("cpu"), 2, RECIPES["O2"], Record({}, lambda line: None))
    pair = break_even_blocks.BlockPair(run, dialect, 64)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for tokens in (32, 64, 96):
        rows = pair.time(tokens, "compiled")
        assert [row.mode for row in rows] == ["compiled"] * 2 and not any(row.wrong for row in rows)
        assert 0.05 < rows[1].error and 0 < rows[1].ms
    assert counters["unique_graphs"] - before == 2  # BF16 and FP8


@pytest.mark.parametrize("recipe", ["O1", "O2", "paper"])
@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_block_is_fused_and_casts_each_weight_in_every_call(recipe, scaling, small, monkeypatch, seed):
    run = Run(torch.device("cpu"), 2, replace(RECIPES[recipe], scaling=scaling), Record({}, lambda line: None))
    pair = break_even_blocks.BlockPair(run, "llama", 64)
    weights = {(192, 64), (64, 64), (352, 64), (64, 176)}
    seen = []
    timed = Run.time

    def time(self, function):
        casts.clear()
        fused.clear()
        function()
        seen.append(([shape for shape in casts if shape in weights], len(fused)))
        return timed(self, function)

    casts, fused = count_casts(monkeypatch), []
    original = fused_models.norm_heads
    monkeypatch.setattr(fused_models, "norm_heads", lambda *args: fused.append(1) or original(*args))
    monkeypatch.setattr(Run, "time", time)
    bf16, fp8 = pair.time(32, "eager")
    assert not bf16.wrong and not fp8.wrong and bf16.error == 0
    assert seen[0] == ([], 0) and sorted(seen[1][0]) == sorted(weights) and seen[1][1] == 1


def test_a_wrong_result_is_not_in_the_table(monkeypatch, tmp_path, capsys, seed):
    monkeypatch.setitem(break_even.TOKENS, "cpu", (16,))
    monkeypatch.setitem(break_even.SIDES, "cpu", (32,))
    right = break_even.time_layer

    def wrong(run, row, build, inputs, outputs):
        row = right(run, row, build, inputs, outputs)
        return replace(row, error=math.nan) if inputs != outputs else row

    monkeypatch.setattr(break_even, "time_layer", wrong)
    path = tmp_path / "table.csv"
    assert main(["bench", "--device", "cpu", "--break-even", str(path), "--only", "layer"]) == 1
    table = find_table("cpu", path)
    assert table is not None and [(one.inputs, one.outputs) for one in table.measurements] == [(32, 32)]
    assert "WRONG" in capsys.readouterr().out


def test_what_does_not_fit_is_left_out(monkeypatch, tmp_path, capsys, seed):
    monkeypatch.setitem(break_even.TOKENS, "cpu", (16,))
    monkeypatch.setitem(break_even.SIDES, "cpu", (32,))

    def full(*arguments):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(break_even, "time_layer", full)
    path = tmp_path / "table.csv"
    assert main(["bench", "--device", "cpu", "--break-even", str(path), "--only", "layer"]) == 0
    assert "out of memory" in capsys.readouterr().out and not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear"], "--break-even runs alone"),
        (["--set", "recipe=bf16"], "recipe=bf16"),
        (["--only", "octavo"], "layer and block"),
        ([], "there is no folder"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(arguments, message, tmp_path, capsys):
    path = tmp_path / ("table.csv" if arguments else "none/table.csv")
    assert main(["bench", *arguments, "--device", "cpu", "--break-even", str(path)]) == 2
    assert message in capsys.readouterr().err and not path.exists()


def test_a_block_is_built_as_it_is_planned(monkeypatch, tmp_path, seed):
    path = write_table(tmp_path / "table.csv", "cpu")
    config = replace(SIZES["tiny"], dim=64, n_layers=1)
    setup = Setup(config, RECIPES["O2"], 16, 1, table=path, capability="cpu")
    assert setup.left == {(64, 64)}
    seen = []
    for name in ("convert_plain", "build_octavo"):
        build = getattr(models, name)
        monkeypatch.setattr(models, name, lambda *args, build=build: seen.append(build(*args)) or seen[-1])
    run = Run(torch.device("cpu"), 10, RECIPES["O2"], Record({}, lambda line: None), only=("octavo",))
    models.run_block(run, models.Workload("one layer", setup))
    models.run_step(run, [models.Workload("one layer", setup)])
    for model, row in zip(seen, run.record.rows, strict=True):
        assert row.ms is not None and not row.wrong and "64 → 64" in row.note
        converted = {layer.fqn for layer in convert_report(model) if layer.converted}
        assert converted == {"blocks.0.attention.qkv", "blocks.0.ffn.up", "blocks.0.ffn.out"}
        elements = sum(model.get_submodule(fqn).weight.numel() for fqn in converted)
        assert elements == setup.converted_parameters


def test_a_plan_of_a_measured_gpu(tmp_path):
    assert {gpu.capability for gpu in GPUS.values()} == {"9.0"}
    path = write_table(tmp_path / "table.csv", "9.0", ("eager", "graph"))
    settings = ["model.vocab_size=1000", f"model.break_even={path}", "model.fused=false"]
    plan = make_plan(override(get_preset("gpt_125m"), settings))
    assert (768, 768) in plan.setup.left and (768, 3072) not in plan.setup.left
    everything = make_plan(override(get_preset("gpt_125m"), [settings[0], "model.break_even=none"]))
    assert everything.setup.left == frozenset()
    assert plan.setup.converted_parameters < everything.setup.converted_parameters
    assert sum(plan.setup.resident().values()) > sum(everything.setup.resident().values())
    unmeasured = write_table(tmp_path / "other.csv", "12.0")
    assert not make_plan(override(get_preset("gpt_125m"), [settings[0], f"model.break_even={unmeasured}"])).setup.left


def test_a_single_layer_is_timed_in_fp8_whatever_its_speed(monkeypatch, tmp_path, seed):
    """The rows are what a rule is made of, so none decides here."""
    run = Run(torch.device("cpu"), 10, RECIPES["O2"], Record({}, lambda line: None), only=("octavo",))
    linear.run_linear(run, 16, [(32, 32)])
    assert run.record.rows[0].error is not None and run.record.rows[0].error > 0.03
