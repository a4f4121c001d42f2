"""The plan of fused blocks, against the training step as it runs, the graphs that a compiler gets, and allocator's figures of an H200."""

from __future__ import annotations

import dataclasses

import pytest
from measuring import compiled_block
from test_plan import GPT, GPT20B, LLAMA, check

from octavo.models import SIZES, TransformerConfig
from octavo.plan import Setup, simulate
from octavo.plan.shapes import STATES, WORK
from octavo.plan.step import begin, forward_only
from octavo.recipe import RECIPES

TOLERANCE = 0.05
BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
MODES = ["none", "selective", "full"]
GIB = 2**30


def fused(model: TransformerConfig, **changes) -> TransformerConfig:
    return dataclasses.replace(model, fused=True, **changes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("recipe", "batch"), [("bf16", 4), ("O1", 1), ("O2", 2), ("O2", 16)])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_peak_of_the_running_step(model, recipe, batch, mode, seed):
    check(Setup(fused(model, recompute=mode), RECIPES[recipe], 64, batch, device="cpu"), fake=False, seed=seed)


@pytest.mark.parametrize(
    ("model", "recipe", "changes"),
    [
        (GPT, "O2", {"micro_batches": 2}),
        (LLAMA, "O2", {"micro_batches": 3}),
        (GPT, "O2", {"release": "partial"}),
        (LLAMA, "O2", {"release": "two_pass"}),
        (dataclasses.replace(GPT, tie_embeddings=True), "O2", {}),
        (dataclasses.replace(GPT, positions="learned", **BIASED), "O2", {}),
        (LLAMA, "paper", {}),
        (GPT, "O2-delayed", {}),
    ],
    ids=["accumulating", "accumulating-3", "partial", "two_pass", "tied", "learned, biases", "paper", "delayed"],
)
def test_peak_of_other_ways_to_train(model, recipe, changes, seed):
    recipe = dataclasses.replace(RECIPES["O2"], scaling="delayed") if recipe == "O2-delayed" else RECIPES[recipe]
    check(Setup(fused(model), recipe, 64, 4, device="cpu", **changes), fake=False, seed=seed)


BIG = [(SIZES["7b"], "none", 2), (SIZES["13b"], "selective", 1), (GPT20B, "full", 2), (SIZES["llama-8b"], "none", 1)]
NAMES = ["7b", "13b", "20b", "llama"]


@pytest.mark.parametrize(
    ("model", "mode", "batch", "layers"),
    [
        *((*case, 2) for case in BIG),
        *(pytest.param(*case, case[0].n_layers, marks=pytest.mark.sweep) for case in BIG),
    ],
    ids=[*NAMES, *(f"{name}-whole" for name in NAMES)],
)
def test_peak_of_large_shapes(model, mode, batch, layers):
    model = fused(model, n_layers=layers, recompute=mode, max_seq_len=2048)
    check(Setup(model, RECIPES["O2"], 2048, batch, device="cpu"), fake=True)


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_compiled_block_keeps_and_takes_what_is_planned(model, mode, seed):
    model = fused(model, n_layers=1, recompute=mode, dim=256, ffn_dim=None)
    setup = Setup(model, RECIPES["O2"], 64, 16, compiled=True)
    kept, most = compiled_block(setup, seed)
    tape, step = begin(setup)
    resting = tape.now
    step.forward()
    tape.drop("x 1", "rotary")  # the output, and what is made outside of blocks
    assert tape.now - resting == pytest.approx(kept, rel=0.001)
    tape.hold("g", step.stream, WORK)
    tape.peak = 0
    step.block_backward(0)
    assert tape.peak - resting == pytest.approx(most, rel=0.01)


def h200(layers: int, compiled: bool, **changes) -> Setup:
    """What was measured on one H200 with torch 2.11 (docs/log.md): 4,096 channels, biases, 8 x 2,048 tokens."""
    model = TransformerConfig("gpt", 4096, layers, 32, vocab_size=50_304, max_seq_len=2048, fused=True, **BIASED)
    return Setup(dataclasses.replace(model, **changes), RECIPES["O2"], 2048, 8, compiled=compiled)


def without_optimizer(setup: Setup) -> float:
    """GiB of the planned peak when no optimizer was made."""
    return (simulate(setup).peak - setup.resident()[STATES]) / GIB


@pytest.mark.parametrize(
    ("setup", "allocated"),
    [
        (h200(4, False), 14.39),
        (h200(4, True), 12.39),
        (h200(8, True), 20.9),
        (h200(8, True, fused=False), 22.9),
    ],
    ids=["eager", "compiled", "compiled, 8 layers", "compiled, not fused"],
)
def test_peak_of_4096_channels_on_an_h200(setup, allocated):
    assert without_optimizer(setup) == pytest.approx(allocated, rel=TOLERANCE)


@pytest.mark.parametrize(("compiled", "allocated"), [(False, 12.38), (True, 11.13)], ids=["eager", "compiled"])
def test_bytes_before_and_after_a_forward_on_an_h200(compiled, allocated):
    setup = h200(4, compiled)
    resident = setup.resident()
    assert (sum(resident.values()) - resident[STATES]) / GIB == pytest.approx(3.10, rel=TOLERANCE)
    head = 4 * setup.head_elements + 2 * setup.model.dim * setup.tokens  # both gradients, which the loss makes
    assert (forward_only(setup).now - resident[STATES] + head) / GIB == pytest.approx(allocated, rel=0.01)
