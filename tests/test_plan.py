"""The plan against the training step as it runs, on the CPU: peak and resting bytes within 5%, for all that it distinguishes.

Small models run for real; the shapes of 7B to 20B on fake tensors, with fewer layers, except where marked slow.
"""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from measuring import measure

from octavo.cli import main
from octavo.models import SIZES, TransformerConfig
from octavo.plan import GPUS, Setup, format_plan, largest_micro_batch, make_plan, setup_of, simulate
from octavo.plan.report import fewest_recomputed
from octavo.plan.shapes import KINDS, STATES
from octavo.plan.speed import step_time
from octavo.plan.tape import Tape
from octavo.recipe import RECIPES
from octavo.settings import override
from octavo.train.presets import get_preset

TOLERANCE = 0.05
GPT = TransformerConfig("gpt", 128, 2, 4, vocab_size=250, max_seq_len=64)
LLAMA = TransformerConfig("llama", 128, 2, 4, 2, ffn_dim=384, vocab_size=250, max_seq_len=64)
BY_NAME = RECIPES | {"O2 BF16 head": dataclasses.replace(RECIPES["O2"], head_grad_output=None)}
FIRST = {"n_layers": 3, "recompute": "full", "recompute_layers": 1}
GPT20B = TransformerConfig("gpt", 6144, 44, 48, vocab_size=50_257, max_seq_len=2048)


def check(setup: Setup, fake: bool, seed: int = 0) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        peak, rest, where = measure(setup, fake, seed)
    tape = simulate(setup)
    assert tape.peak == pytest.approx(peak, rel=TOLERANCE), f"measured at {where}, planned at {tape.when}"
    assert sum(setup.resident().values()) == pytest.approx(rest, rel=0.01)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(("recipe", "batch"), [("bf16", 4), ("O1", 1), ("O2", 2), ("O2", 16), ("O2 BF16 head", 16)])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_peak_of_the_running_step(model, recipe, batch, mode, seed):
    model = dataclasses.replace(model, recompute=mode)
    check(Setup(model, BY_NAME[recipe], 64, batch, device="cpu"), fake=False, seed=seed)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (GPT, {"micro_batches": 2}),
        (LLAMA, {"micro_batches": 3}),
        (LLAMA, {"micro_batches": 2, "micro_batch": 1, "recipe": "O1"}),
        (GPT, {"release": "partial"}),
        (LLAMA, {"release": "two_pass", "micro_batch": 16}),
        (dataclasses.replace(GPT, tie_embeddings=True), {}),
        (dataclasses.replace(GPT, dtype=torch.float32), {}),
        (GPT, {"recipe": "paper"}),
        (GPT, {"recipe": "paper-3"}),
        (dataclasses.replace(GPT, tie_embeddings=True), {"recipe": "paper-4"}),
        (dataclasses.replace(GPT, positions="learned", ffn_bias=True), {"recipe": "paper-4"}),
        (dataclasses.replace(GPT, **FIRST), {"micro_batch": 16}),
    ],
    ids=[
        "accumulating",
        "accumulating-3",
        "accumulating O1",
        "partial",
        "two_pass",
        "tied",
        "fp32",
        "paper",
        "paper-3",
        "paper-4 tied",
        "paper-4 learned",
        "first block recomputed",
    ],
)
def test_peak_of_other_ways_to_train(model, changes, seed):
    changes = {"recipe": "O2", "micro_batch": 4, **changes}
    changes["recipe"] = RECIPES[changes["recipe"]]
    check(Setup(model, seq_len=64, device="cpu", **changes), fake=False, seed=seed)


BIG = [
    (SIZES["7b"], "O2", "none", 2, 2),
    (SIZES["13b"], "O2", "selective", 1, 2),
    (GPT20B, "O2", "full", 2, 2),
    (SIZES["llama-8b"], "O2", "none", 1, 2),
    (SIZES["llama-8b"], "O2", "full", 8, 1),  # the gradient of the head in two groups of chunks
]
WHOLE = [
    (SIZES["7b"], "O2", "none", 2, 32),
    (SIZES["13b"], "O2", "full", 2, 40),
    (GPT20B, "O2", "full", 1, 44),
    (SIZES["llama-13b"], "bf16", "selective", 1, 40),
]
NAMES = ["7b", "13b", "20b", "llama", "groups"]


@pytest.mark.parametrize(
    ("model", "recipe", "mode", "batch", "layers"),
    [*BIG, *(pytest.param(*case, marks=pytest.mark.sweep) for case in WHOLE)],
    ids=[*NAMES, *(f"{name}-whole" for name in NAMES[:4])],
)
def test_peak_of_large_shapes(model, recipe, mode, batch, layers):
    model = dataclasses.replace(model, n_layers=layers, recompute=mode, max_seq_len=2048)
    check(Setup(model, BY_NAME[recipe], 2048, batch, device="cpu"), fake=True)


@pytest.mark.parametrize(("recipe", "allocated"), [("O2", 19.7), ("bf16", 23.2)])
def test_peak_of_125m_on_an_h200(recipe, allocated):
    """Allocator's peaks of compiled runs on one H200 with torch 2.11 (docs/log.md), made before there was a plan."""
    settings = ["model.vocab_size=32768", "train.micro_batches=1", f"recipe={recipe}", "model.break_even=none"]
    settings.append("model.fused=false")
    plan = make_plan(override(get_preset("gpt_125m"), settings))
    assert plan.tape.peak / 2**30 == pytest.approx(allocated, rel=TOLERANCE)


# --- what the plan says


def plan_of(preset: str, *settings: str, gpu: str = "h200"):
    return make_plan(override(get_preset(preset), ["model.vocab_size=50257", *settings]), gpu)


def test_bytes_between_steps_are_those_of_the_recipe():
    for recipe, want in (("bf16", 12), ("O1", 12), ("O2", 2 + 1 + 4 / 128 + 2), ("paper", 5)):
        setup = setup_of(override(get_preset("gpt_7b"), [f"recipe={recipe}"]))
        names = list(setup.linears)
        size = sum(setup.weight_bytes(name) + setup.state_bytes(name) for name in names)
        assert size / sum(setup.size(name) for name in names) == pytest.approx(want, rel=1e-3)


def test_moments_of_embedding_and_head_are_small_where_the_recipe_says_so():
    setup = setup_of(override(get_preset("gpt_7b"), ["model.vocab_size=50257"]))
    tables = 2 * setup.head_elements
    plain, small = (
        dataclasses.replace(setup, recipe=dataclasses.replace(RECIPES["O2"], moments_of=whose)).resident()[STATES]
        for whose in ("converted", "matrices")
    )
    assert plain - small == 8 * tables - (3 * tables + tables // 128 * 4 + 2 * 4)


def test_13b_and_20b_train_on_one_h200():
    assert not plan_of("gpt_13b", "recipe=bf16", "data.micro_batch=1").fits
    assert plan_of("gpt_13b", "data.micro_batch=1").fits
    settings = ["model.dim=6144", "model.n_layers=44", "model.n_heads=48", "data.micro_batch=1", "model.recompute=full"]
    released = plan_of("gpt_13b", *settings, "optim.release=partial", "train.micro_batches=1")
    assert released.setup.model.num_parameters == pytest.approx(20.55e9, rel=0.01)
    assert released.fits
    assert released.tape.peak < plan_of("gpt_13b", *settings).tape.peak - 15e9


def test_each_saving_saves():
    base = plan_of("gpt_7b", "train.micro_batches=1", "data.micro_batch=2")
    peaks = [base.tape.peak]
    for settings in (
        ["model.recompute=selective"],
        ["model.recompute=full"],
        ["model.recompute=full", "optim.release=partial"],
    ):
        peaks.append(plan_of("gpt_7b", "train.micro_batches=1", "data.micro_batch=2", *settings).tape.peak)
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    eager = plan_of("gpt_7b", "train.micro_batches=1", "data.micro_batch=2", "train.compile=false")
    assert eager.tape.at_peak["weight copies"] > base.tape.at_peak.get("weight copies", 0)
    assert set(base.tape.at_peak) <= set(KINDS) and sum(base.tape.at_peak.values()) == base.tape.peak


def test_largest_micro_batch_is_the_largest():
    setup = setup_of(override(get_preset("gpt_7b"), ["model.vocab_size=50257"]))
    for gpu in GPUS.values():
        best = largest_micro_batch(setup, gpu.memory)
        sizes = [simulate(dataclasses.replace(setup, micro_batch=size)).peak for size in (max(best, 1), best + 1)]
        assert sizes[1] > gpu.memory and (best == 0 or sizes[0] <= gpu.memory)


def test_fewest_recomputed_blocks_are_the_fewest():
    settings = ["model.dim=6144", "model.n_layers=44", "model.n_heads=48", "model.fused=true", "train.micro_batches=1"]
    plan = plan_of("gpt_13b", *settings, "data.micro_batch=4", "model.recompute=full")
    memory = GPUS["h200"].memory
    least = fewest_recomputed(plan.setup, memory)
    assert f"model.recompute_layers={least} would do" in format_plan(plan)

    def peak(layers: int) -> float:
        model = dataclasses.replace(plan.setup.model, recompute_layers=layers)
        return simulate(dataclasses.replace(plan.setup, model=model)).peak

    assert 1 < least < 44 and peak(least) <= memory < peak(least - 1)
    fewer = plan_of(
        "gpt_13b", *settings, "data.micro_batch=4", "model.recompute=full", f"model.recompute_layers={least}"
    )
    assert fewer.time.seconds < 0.95 * plan.time.seconds
    assert f"recompute full, {least} of 44 blocks" in format_plan(fewer) and "would do" not in format_plan(fewer)


def test_recomputation_that_nothing_asks_for_is_named():
    plan = plan_of("gpt_125m", "train.micro_batches=1", "data.micro_batch=1", "model.recompute=full")
    assert fewest_recomputed(plan.setup, GPUS["h200"].memory) == 0
    assert "model.recompute=none would do" in format_plan(plan)


def test_time_grows_with_what_is_repeated():
    times = {mode: plan_of("gpt_7b", f"model.recompute={mode}").time for mode in ("none", "selective", "full")}
    assert times["none"].seconds < times["selective"].seconds < times["full"].seconds < 1.4 * times["none"].seconds
    once = plan_of("gpt_7b", "train.micro_batches=1", "optim.release=partial").time
    twice = plan_of("gpt_7b", "train.micro_batches=1", "optim.release=two_pass").time
    assert 1.5 < twice.seconds / once.seconds < 1.7
    assert plan_of("gpt_7b", "recipe=bf16").time.seconds > 1.3 * times["none"].seconds
    setup = setup_of(override(get_preset("gpt_7b"), ["model.vocab_size=50257"]))
    assert step_time(setup, GPUS["h100"]).seconds > step_time(setup, GPUS["h200"]).seconds


def test_tape():
    tape = Tape()
    tape.moment = "first"
    tape.hold("a", 100, "weights")
    tape.brief(50, "workspace")
    tape.moment = "second"
    tape.hold("b", 49, "gradients")
    tape.drop("b", "never held")
    assert (tape.now, tape.peak, tape.when) == (100, 150, "first")
    assert tape.at_peak == {"weights": 100, "workspace": 50} and tape.by_kind() == {"weights": 100}


# --- the command


def test_command(capsys):
    assert main(["plan", "gpt-13b", "--set", "model.vocab_size=50257"]) == 0
    text = capsys.readouterr().out
    assert "13.10B parameters" in text and "H200 has 139.0 GiB: it fits" in text and "tokens/s" in text
    assert main(["plan", "gpt_13b", "--gpu", "h100"]) == 0
    assert "not even a micro-batch of 1 fits; it does with" in capsys.readouterr().out
    assert main(["plan", "gpt_175b"]) == 0
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt_13", "--gpu", "h200"], "no preset"),
        (["gpt_13b", "--gpu", "tpu"], "no GPU is called 'tpu'; there are h200, h100"),
        (["gpt_13b", "--set", "optim.release=partial"], "needs train.micro_batches=1, but it is 1024"),
        (["gpt_13b", "--set", "model.from=somewhere"], "not of a checkpoint"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
