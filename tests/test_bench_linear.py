"""What is timed is a layer as it is in the middle of training."""

from dataclasses import replace

import torch

from octavo.bench import linear, models
from octavo.bench.rows import Record
from octavo.bench.run import Run
from octavo.linear import FP8Linear
from octavo.models import SIZES
from octavo.plan import Setup
from octavo.recipe import RECIPES

DELAYED = replace(RECIPES["O2"], scaling="delayed")


def run(recipe=DELAYED) -> Run:
    return Run(torch.device("cpu"), 10, recipe, Record({}, lambda line: None), only=("octavo",))


def scalings(model: torch.nn.Module) -> list:
    layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
    assert layers
    return [scaling for layer in layers for scaling in (layer.input_scaling, layer.grad_output_scaling)]


def test_delayed_scales_are_warm_when_a_layer_is_timed(monkeypatch, seed):
    seen, convert = [], linear.convert

    def keep(*args, **options):
        seen.append(convert(*args, **options))
        return seen[-1]

    monkeypatch.setattr(linear, "convert", keep)
    one = run()
    linear.run_linear(one, 32, [(32, 48)])
    (row,) = one.record.rows
    assert row.ms is not None and not row.wrong
    assert all(scaling.warm and scaling.history.amax() > 0 for scaling in scalings(seen[0]))


def test_delayed_scales_are_warm_when_a_step_is_timed(monkeypatch, seed):
    seen, build = [], models.build_octavo

    def keep(*args):
        seen.append(build(*args))
        return seen[-1]

    monkeypatch.setattr(models, "build_octavo", keep)
    one = run()
    config = replace(SIZES["tiny"], dim=32, n_layers=1)
    models.run_step(one, [models.Workload("one layer", Setup(config, DELAYED, 16, 1))])
    (row,) = one.record.rows
    assert row.ms is not None and not row.wrong
    assert all(scaling.warm and scaling.history.amax() > 0 for scaling in scalings(seen[0]))


def test_only_octavo_runs_fused_blocks(seed):
    config = replace(SIZES["tiny"], fused=True)
    for build in (models.build_plain, models.build_bf16):
        assert not build(run(), config).config.fused
    assert models.build_octavo(run(), config).config.fused
