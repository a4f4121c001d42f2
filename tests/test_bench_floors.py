"""Floors are bytes and operations over rates, and grow as the work does."""

from dataclasses import replace

import pytest

from octavo.bench.floors import bytes_ms, linear_ms, plain_linear_ms, step_ms
from octavo.models import SIZES
from octavo.plan import GPUS, Setup
from octavo.plan.speed import step_time
from octavo.recipe import RECIPES

H200 = GPUS["h200"]
BLOCKS = Setup(replace(SIZES["7b"], n_layers=8), RECIPES["O2"], 2048, 8, compiled=True)


def test_one_rate():
    assert bytes_ms(H200.copy / 1e9, H200) == pytest.approx(1000)
    assert bytes_ms(1.0, None) is None and linear_ms(1, 1, 1, None) is None


def test_fp8_has_the_lower_floor_for_large_layers_and_pays_its_casts():
    fp8, bf16 = linear_ms(16_384, 4096, 16_384, H200), plain_linear_ms(16_384, 4096, 16_384, H200)
    gemms = 6 * 16_384 * 4096 * 16_384 / H200.fp8_forward * 1e3
    assert gemms < fp8 < bf16


def test_an_ideal_step_is_below_the_planned_one():
    """And what the plan already counts at its least, GEMMs and attention, is the same."""
    floor, plan = step_ms(BLOCKS, H200), step_time(BLOCKS, H200).by_kind
    for kind in ("FP8 GEMMs", "BF16 GEMMs", "attention", "optimizer"):
        assert floor[kind] == pytest.approx(1e3 * plan[kind])
    assert 0.3 < floor["element-wise"] / (1e3 * plan["element-wise"]) < 0.7


@pytest.mark.parametrize("size", ["7b", "llama-7b"])
def test_floors_are_proportional_to_tokens_but_for_the_weights(size):
    setup = replace(BLOCKS, model=SIZES[size])
    once, twice = step_ms(setup, H200), step_ms(replace(setup, micro_batch=16), H200)
    for kind in ("FP8 GEMMs", "BF16 GEMMs", "attention", "element-wise"):
        assert twice[kind] == pytest.approx(2 * once[kind])
    for kind in ("optimizer", "weight casts"):
        assert twice[kind] == once[kind]


def test_recomputation_repeats_the_forward():
    blocks = replace(BLOCKS, recipe=replace(BLOCKS.recipe, head_grad_output=None))
    again = replace(blocks, model=replace(blocks.model, recompute="full"))
    once, twice = step_ms(blocks, H200), step_ms(again, H200)
    assert twice["FP8 GEMMs"] > 1.3 * once["FP8 GEMMs"] and twice["element-wise"] > 1.3 * once["element-wise"]
    assert twice["optimizer"] == once["optimizer"]
