"""The plan of fused blocks, against the training step as it runs, the graphs that a compiler gets, and allocator's figures of an H200."""

from __future__ import annotations

import dataclasses

import pytest
from measuring import compiled_block
from test_plan import BY_NAME, FIRST, GPT, GPT20B, LLAMA, check

from octavo.models import SIZES, TransformerConfig
from octavo.models.loss import CHUNK_ELEMENTS
from octavo.plan import GPUS, Setup, format_plan, make_plan, simulate
from octavo.plan.report import alternatives
from octavo.plan.shapes import COPIES, STATES, WORK
from octavo.plan.speed import step_time
from octavo.plan.step import begin, forward_only
from octavo.recipe import RECIPES
from octavo.settings import override
from octavo.train.presets import get_preset

TOLERANCE = 0.05
BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
MODES = ["none", "selective", "full"]
GIB = 2**30


def fused(model: TransformerConfig, **changes) -> TransformerConfig:
    return dataclasses.replace(model, fused=True, **changes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("recipe", "batch"), [("bf16", 4), ("O1", 1), ("O2", 2), ("O2", 16), ("O2 BF16 head", 16)])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_peak_of_the_running_step(model, recipe, batch, mode, seed):
    check(Setup(fused(model, recompute=mode), BY_NAME[recipe], 64, batch, device="cpu"), fake=False, seed=seed)


@pytest.mark.parametrize(
    ("model", "recipe", "changes"),
    [
        (GPT, "O2", {"micro_batches": 2}),
        (LLAMA, "O2", {"micro_batches": 3}),
        (GPT, "O2", {"release": "partial"}),
        (LLAMA, "O2", {"release": "two_pass", "micro_batch": 16}),
        (dataclasses.replace(GPT, tie_embeddings=True), "O2", {}),
        (dataclasses.replace(GPT, positions="learned", **BIASED), "O2", {}),
        (LLAMA, "paper", {}),
        (GPT, "O2-delayed", {}),
        (dataclasses.replace(GPT, **FIRST), "O2", {"micro_batch": 16}),
    ],
    ids=[
        "accumulating",
        "accumulating-3",
        "partial",
        "two_pass",
        "tied",
        "learned, biases",
        "paper",
        "delayed",
        "first",
    ],
)
def test_peak_of_other_ways_to_train(model, recipe, changes, seed):
    recipe = dataclasses.replace(RECIPES["O2"], scaling="delayed") if recipe == "O2-delayed" else RECIPES[recipe]
    changes = {"micro_batch": 4, **changes}
    check(Setup(fused(model), recipe, 64, device="cpu", **changes), fake=False, seed=seed)


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
    """What was measured on one H200 with torch 2.11 (docs/log.md): 4,096 channels, biases, a BF16 head, 8 x 2,048 tokens."""
    model = TransformerConfig("gpt", 4096, layers, 32, vocab_size=50_304, max_seq_len=2048, fused=True, **BIASED)
    return Setup(dataclasses.replace(model, **changes), BY_NAME["O2 BF16 head"], 2048, 8, compiled=compiled)


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


def test_peak_of_other_runs_of_4096_channels_on_an_h200():
    """Where the plan has no such run: eager blocks with a compiled loss, and BF16 with parameters in BF16, which need no copies."""
    logits = (CHUNK_ELEMENTS // 50_304) * 50_304
    assert without_optimizer(h200(8, False)) - 6 * logits / GIB == pytest.approx(23.4, rel=TOLERANCE)
    plain = dataclasses.replace(h200(8, True, fused=False), recipe=RECIPES["bf16"])
    spared = 2 * plain.model.num_parameters + simulate(plain).at_peak[COPIES]
    assert without_optimizer(plain) - spared / GIB == pytest.approx(24.1, rel=TOLERANCE)


@pytest.mark.parametrize(("compiled", "allocated"), [(False, 12.38), (True, 11.13)], ids=["eager", "compiled"])
def test_bytes_before_and_after_a_forward_on_an_h200(compiled, allocated):
    setup = h200(4, compiled)
    resident = setup.resident()
    assert (sum(resident.values()) - resident[STATES]) / GIB == pytest.approx(3.10, rel=TOLERANCE)
    head = 4 * setup.head_elements + 2 * setup.model.dim * setup.tokens  # both gradients, which the loss makes
    # Compiled blocks kept a transposed copy of their last weight at the time; their regions are cut otherwise since.
    then = compiled * setup.model.n_layers * setup.size("ffn out")
    assert (forward_only(setup).now - resident[STATES] + head + then) / GIB == pytest.approx(allocated, rel=0.01)


def test_time_of_4096_channels_on_an_h200():
    """A profile of forward and backward, eager: kernels of the blocks but GEMMs and attention, and the whole."""
    times = {kind: 1e3 * seconds for kind, seconds in step_time(h200(8, False), GPUS["h200"]).by_kind.items()}
    kernels = 6.0 + 3.7 + 4.9 + 2.3 + 2.1 + 2.7 + 1.3 + 1.25 + 1.1 + 0.7
    assert times["element-wise"] + times["weight casts"] == pytest.approx(kernels, rel=0.1)
    assert times["FP8 GEMMs"] == pytest.approx(118, rel=0.1)
    assert 0.9 * 211.2 < sum(times.values()) - times["optimizer"] < 211.2


def test_an_fp8_head_takes_less_time_and_no_more_memory():
    plain = h200(8, True)
    head = dataclasses.replace(plain, recipe=RECIPES["O2"])
    assert head.fp8_head and not plain.fp8_head
    before, after = (step_time(setup, GPUS["h200"]).by_kind for setup in (plain, head))
    assert after["BF16 GEMMs"] == pytest.approx(before["BF16 GEMMs"] / 3)  # no layer but the head
    assert 5e-3 < sum(before.values()) - sum(after.values()) < 15e-3
    assert simulate(head).peak <= 1.01 * simulate(plain).peak


@pytest.mark.parametrize("model", [SIZES["7b"], SIZES["llama-8b"]], ids=["gpt", "llama"])
def test_fused_blocks_move_fewer_bytes_and_keep_fewer(model):
    plain, one = (
        Setup(dataclasses.replace(model, fused=on), RECIPES["O2"], 2048, 2, compiled=True) for on in (False, True)
    )
    before, after = (step_time(setup, GPUS["h200"]).by_kind["element-wise"] for setup in (plain, one))
    assert 0.5 * before < after < 0.85 * before
    assert simulate(one).peak < simulate(plain).peak


def test_what_cannot_be_fused_is_planned_as_it_runs():
    setup = Setup(fused(SIZES["7b"]), RECIPES["O2"], 2048, 2, compiled=True)
    delayed = dataclasses.replace(RECIPES["O2"], scaling="delayed")
    assert setup.fused and not dataclasses.replace(setup, recipe=RECIPES["bf16"]).fused
    assert not dataclasses.replace(setup, recipe=delayed).fused  # a compiler cannot trace it
    assert dataclasses.replace(setup, recipe=delayed, compiled=False).fused


def test_plan_says_whether_blocks_are_fused():
    def text(*settings):
        base = ["model.vocab_size=50257", "model.break_even=none", "data.micro_batch=1", "model.fused=true"]
        return format_plan(make_plan(override(get_preset("gpt_7b"), [*base, *settings])))

    assert "compiled, blocks fused" in text()
    assert "blocks not fused: not all" in text("recipe=bf16")
    assert "fused" not in text("model.fused=false").splitlines()[1]


def test_fusing_is_proposed_where_memory_is_short():
    plain = Setup(SIZES["7b"], RECIPES["O2"], 2048, 2, compiled=True)
    proposed = dict(alternatives(plain))
    assert proposed["model.fused=true"].fused and "model.fused=true" not in dict(
        alternatives(proposed["model.fused=true"])
    )


def test_a_graph_casts_weights_in_each_micro_batch():
    """Twice; and the peak is that of the first steps, which keep what they cast."""
    eager = Setup(SIZES["7b"], RECIPES["O2"], 2048, 2, micro_batches=4)
    graph, compiled = (dataclasses.replace(eager, **{way: True}) for way in ("graph", "compiled"))
    casts = [step_time(setup, GPUS["h200"]).by_kind["weight casts"] for setup in (eager, graph, compiled)]
    assert casts[0] < casts[1] == casts[2]
    assert simulate(graph).peak == simulate(eager).peak


def test_nothing_is_proposed_that_a_replayed_run_cannot_have():
    replayed = override(get_preset("gpt_7b"), ["model.vocab_size=50257", "train.graph=true"])
    assert "compiled, replayed from a CUDA graph, blocks fused" in format_plan(make_plan(replayed))
    for config in (replayed, override(replayed, ["train.compile=false", "recipe.scaling=delayed"])):
        for words, _ in alternatives(make_plan(config).setup):
            override(config, words.split())


@pytest.mark.parametrize(("mode", "batch"), [("none", 2), ("none", 16), ("selective", 16), ("full", 16)])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_peak_of_the_compiled_step(model, mode, batch, seed):
    model = fused(model, recompute=mode, dim=256, ffn_dim=None)
    check(Setup(model, RECIPES["O2"], 64, batch, compiled=True, device="cpu"), fake=False, seed=seed)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("none", {"micro_batches": 2}),
        ("none", {"micro_batches": 3}),
        ("none", {"release": "partial"}),
        ("full", {"release": "partial"}),
        ("none", {"release": "two_pass"}),
    ],
    ids=["accumulating", "accumulating-3", "partial", "full, partial", "two_pass"],
)
def test_peak_of_other_ways_to_train_compiled(mode, changes, seed):
    model = fused(GPT, recompute=mode, dim=256)
    check(Setup(model, RECIPES["O2"], 64, 8, compiled=True, device="cpu", **changes), fake=False, seed=seed)
