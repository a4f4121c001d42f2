"""`model.break_even` in a run: layers that FP8 slows down stay as they are, in this run and in all that comes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from training import assert_same_checkpoint, newest, small_config

from octavo.convert import BreakEven
from octavo.linear import FP8Linear
from octavo.plan import setup_of
from octavo.settings import override
from octavo.train import checkpoint_folder
from octavo.train.presets import get_preset
from octavo.train.restore import SavedRun
from octavo.train.trainer import Trainer

ATTENTION, FEED_FORWARD = {"attention.qkv", "attention.out"}, {"ffn.up", "ffn.out"}


def write_table(path: Path, square: float, wide: float) -> Path:
    """A table of this CPU: the speedups of square layers, and of layers four times as wide."""
    lines = [f"cpu,a device,eager,32,32,{outputs},1,{1 / speed}" for outputs, speed in ((32, square), (128, wide))]
    path.write_text("\n".join(["capability,device,mode,tokens,inputs,outputs,bf16_us,fp8_us", *lines]))
    return path


@pytest.fixture
def settings(tmp_path) -> list[str]:
    table = write_table(tmp_path / "table.csv", 0.5, 1.1)
    return [
        f"model.break_even={table}",
        "train.steps=4",
        "checkpoint.every=2",
        "checkpoint.keep=3",
        "log.stats_every=2",
        "model.fused=false",
    ]


def converted(model: nn.Module) -> set[str]:
    return {name.partition("blocks.0.")[2] for name, module in model.named_modules() if isinstance(module, FP8Linear)}


@pytest.mark.parametrize("recipe", ["O1", "O2", "paper"])
def test_a_run_and_what_comes_of_it(recipe, settings, tmp_path, capsys, seed):
    config = small_config(tmp_path, *settings, f"recipe={recipe}")
    trainer = Trainer(config)
    result = trainer.run()
    assert converted(trainer.model) == FEED_FORWARD and result.val_loss is not None
    assert "32 → 32, 32 → 96" in capsys.readouterr().out.replace("\n", " ")
    assert checkpoint_folder.read_meta(newest(config))["left"] == [[32, 32], [32, 96]]

    # The table is gone, as on another machine, and the decision stays.
    elsewhere = override(config, [f"out={tmp_path}/half", "model.break_even=auto"])
    early = sorted((trainer.folder / "checkpoints").iterdir())[0]
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    early.rename(tmp_path / "half" / "checkpoints" / early.name)
    half = Trainer(elsewhere, resume=True)
    assert half.step == 2 and converted(half.model) == FEED_FORWARD
    half.run()
    assert_same_checkpoint(newest(config), newest(elsewhere))

    saved = SavedRun.open(config.out).load_model()
    assert converted(saved) == FEED_FORWARD
    for (name, a), b in zip(trainer.model.state_dict().items(), saved.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_run_in_which_nothing_is_faster(settings, tmp_path, seed):
    write_table(tmp_path / "table.csv", 0.5, 0.6)
    config = small_config(tmp_path, *settings, "recipe=O2")
    with pytest.warns(UserWarning, match="converts no layer"):
        trainer = Trainer(config)
    assert converted(trainer.model) == set()
    loss = trainer.run().train_loss
    plain = small_config(tmp_path, *settings, "recipe=bf16", f"out={tmp_path}/plain")
    assert Trainer(plain).run().train_loss == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize(("wide", "expected"), [(1.1, set()), (3.0, ATTENTION | FEED_FORWARD)])
@pytest.mark.filterwarnings("ignore:recipe 'O2' converts no layer")
def test_a_fused_block_is_taken_or_left_as_a_whole(wide, expected, settings, tmp_path, seed):
    write_table(tmp_path / "table.csv", 0.5, wide)
    trainer = Trainer(small_config(tmp_path, *settings, "model.fused=true"))
    assert converted(trainer.model) == expected
    planned = dataclasses.replace(setup_of(override(trainer.config, ["model.vocab_size=257"]), "cpu"), device="cpu")
    assert {*checkpoint_folder.layers_left({"left": trainer._left}).shapes} == planned.left


BLOCK_TABLE = """capability,device,mode,tokens,inputs,outputs,bf16_us,fp8_us,what
cpu,a device,eager,32,32,32,1,2,layer
cpu,a device,graph,32,32,32,1,2,layer
cpu,a device,eager,32,32,128,1,{eager},block
cpu,a device,compiled,32,32,128,1,{compiled},block
"""


@pytest.mark.parametrize(
    ("eager", "compiled", "others", "expected"),
    [
        (0.5, 4, (), True),
        (4, 0.5, (), False),
        (4, 0.5, ("train.compile=true",), True),
        (0.5, 4, ("train.compile=true",), False),
        (0.5, 4, ("recipe.scaling=delayed",), True),
        (0.5, 0.5, ("recipe.scaling=delayed", "train.compile=true"), False),  # runs layer by layer
        (0.5, 0.5, ("model.fused=false",), False),
    ],
)
@pytest.mark.filterwarnings("ignore:recipe .* converts no layer")
def test_a_measured_block_decides_for_fused_ones(eager, compiled, others, expected, settings, tmp_path, seed):
    """Its layers alone are slower, as the head is; the plan decides as the run does."""
    (tmp_path / "table.csv").write_text(BLOCK_TABLE.format(eager=eager, compiled=compiled))
    trainer = Trainer(small_config(tmp_path, *settings, "model.fused=true", *others))
    assert converted(trainer.model) == (ATTENTION | FEED_FORWARD if expected else set())
    planned = setup_of(override(trainer.config, ["model.vocab_size=257"]), "cpu")
    head = 32, planned.model.padded_vocab_size
    assert {*checkpoint_folder.layers_left({"left": trainer._left}).shapes} == planned.left | {head}
    assert not planned.fp8_head


def test_tokens_and_compilation_are_those_of_the_run():
    config = override(get_preset("gpt_125m"), ["data.micro_batch=4", "data.seq_len=1024"])
    assert config.break_even == BreakEven(4096, compiled=True)
    assert override(config, ["model.break_even=none"]).break_even is None
    assert override(config, ["model.break_even=a.csv"]).break_even == BreakEven(4096, compiled=True, table="a.csv")
    assert get_preset("demo").break_even is None, "the demo shows FP8 at any size"
