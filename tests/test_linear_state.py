"""What FP8Linear keeps: activations, the cast weight, gradients and scales; and what other operations do to that."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from fp8_layers import (
    DELAYED,
    LEVELS,
    count_casts,
    equal_states,
    fp8,
    make,
    relative,
    same_bits,
    scaling_state,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from octavo import kernels
from octavo.convert import convert, initialize
from octavo.formats import E4M3, E5M2
from octavo.linear import collect_stats, drop_weight_cache, weight_operand
from octavo.optim import AdamW
from octavo.recipe import O1, O2, RECIPES
from octavo.tensor import ScaledTensor, cast, uncast

# --- what is kept between forward and backward


def saved_tensors(layer: nn.Module, x: Tensor) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    return saved


@LEVELS
def test_activations_are_saved_in_fp8(recipe, seed):
    saved = saved_tensors(make(64, 32, recipe), torch.randn(48, 64, requires_grad=True))
    assert sum(t.nbytes for t in saved) == 48 * 64 + 4
    assert {t.dtype for t in saved} == {torch.float8_e4m3fn, torch.float32}


@LEVELS
def test_frozen_weight_saves_nothing_and_costs_no_wgrad(recipe, seed, monkeypatch):
    layer, x = make(64, 32, recipe), torch.randn(48, 64, requires_grad=True)
    layer.weight.requires_grad_(False)
    assert saved_tensors(layer, x) == []
    calls = []
    gemm = kernels.scaled_mm_nt
    monkeypatch.setattr(kernels, "scaled_mm_nt", lambda *args, **kwargs: calls.append(1) or gemm(*args, **kwargs))
    layer(x).sum().backward()
    assert len(calls) == 2 and layer.weight.grad is None and x.grad is not None


@LEVELS
def test_first_layer_needs_no_dgrad(recipe, seed, monkeypatch):
    layer, x = make(64, 32, recipe), torch.randn(48, 64)
    calls = []
    gemm = kernels.scaled_mm_nt
    monkeypatch.setattr(kernels, "scaled_mm_nt", lambda *args, **kwargs: calls.append(1) or gemm(*args, **kwargs))
    layer(x).sum().backward()
    assert len(calls) == 2 and layer.weight.grad is not None


@LEVELS
def test_unfrozen_later(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    convert(model, recipe)
    assert not model[0].weight.requires_grad
    x = torch.randn(8, 64, requires_grad=True)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    model[0].weight.requires_grad_(True)
    model(x).sum().backward()
    assert isinstance(model[0].weight.grad, ScaledTensor)


@LEVELS
def test_input_of_several_layers_is_cast_once(recipe, seed, monkeypatch):
    layers, norm = [make(64, 64, recipe) for _ in range(3)], nn.LayerNorm(64)
    casts = count_casts(monkeypatch)
    x = norm(torch.randn(32, 64))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = sum(layer(x) for layer in layers)
    assert casts.count((32, 64)) == 1
    assert len({t.data_ptr() for t in saved if t.dtype == torch.float8_e4m3fn}) == 1
    separate = [layer(x.detach()) for layer in layers]
    assert torch.equal(y, sum(separate))
    y = x * 1.0
    first = layers[0](y).detach()
    y.mul_(2)
    assert not torch.equal(layers[0](y), first), "a changed input was not cast again"


# --- the weight cache


@LEVELS
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_weight_is_cast_once_per_optimizer_step(recipe, recompute, seed, monkeypatch):
    layer = make(64, 96, recipe)
    optimizer = AdamW(layer.parameters(), recipe=recipe)
    casts = count_casts(monkeypatch)
    for step in range(4):
        for _ in range(4):
            x = torch.randn(8, 64, requires_grad=True)
            (checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)).sum().backward()
        # In the first step nobody can know yet that micro-batches will follow.
        assert casts.count((96, 64)) == 1 or step == 0
        casts.clear()
        optimizer.step()
        optimizer.zero_grad()


@LEVELS
def test_frozen_weight_keeps_no_fp8_copy_after_backward(recipe, seed):
    layer = make(64, 96, recipe)
    layer.weight.requires_grad_(False)
    for _ in range(2):
        x = torch.randn(8, 64, requires_grad=True)
        y = layer(x)
        assert "_octavo_cast" in layer.weight.__dict__
        y.sum().backward()
        assert x.grad.count_nonzero() and "_octavo_cast" not in layer.weight.__dict__


@LEVELS
def test_weight_cache_is_dropped_by_whatever_changes_the_weight(recipe, seed):
    layer, x = make(64, 64, recipe), torch.randn(8, 64)
    y = layer(x)

    def changed() -> bool:
        nonlocal y
        before, y = y, layer(x)
        return not torch.equal(before, y)

    assert not changed()
    with torch.no_grad():
        layer.weight.mul_(3)
    assert changed()
    layer.load_state_dict(nn.Linear(64, 64).state_dict())
    assert changed()
    layer(x).sum().backward()
    AdamW(layer.parameters(), lr=0.1, recipe=recipe).step()
    assert changed()
    layer.weight.data.mul_(3)
    layer.eval()  # averaged weights are often swapped in through .data, before evaluation
    assert changed()
    layer.weight.data.mul_(3)
    drop_weight_cache([layer.weight])
    assert changed()


def test_evaluation_casts_no_transpose(seed):
    layer = make(64, 96).eval()
    with torch.no_grad():
        layer(torch.randn(8, 64))
    assert layer.weight._octavo_cast[1].codes_t is None
    layer(torch.randn(8, 64, requires_grad=True))
    assert layer.weight._octavo_cast[1].codes_t is not None


@LEVELS
def test_changing_the_weight_before_backward_is_an_error(recipe, seed):
    layer, x = make(64, 64, recipe), torch.randn(8, 64, requires_grad=True)
    y = layer(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        y.backward()


def test_H8_frozen_fp8_base_is_one_byte_per_parameter(seed):
    """An E4M3 weight is read as it lies: no cached copy, a transpose for the time of one GEMM."""
    layer = make(64, 128, RECIPES["paper-3"], bias=False)
    layer.weight.requires_grad_(False)
    x = torch.randn(8, 64, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.codes.nbytes == 64 * 128 and not hasattr(layer.weight, "_octavo_cast")
    operand = weight_operand(layer.weight, E4M3)
    assert operand.codes.data_ptr() == layer.weight.codes.data_ptr() and operand.codes_t is None
    assert relative(x.grad, torch.ones(8, 128) @ uncast(layer.weight)) < 1e-5


# --- gradients of weights


@LEVELS
def test_E10_every_micro_batch_counts(recipe, seed):
    """The sum has 25 dB; against FP32 operands the two mantissa bits of E5M2 alone cost 26 dB."""
    layer = make(64, 32, recipe)
    exact, of_fp8 = torch.zeros(32, 64), torch.zeros(32, 64)
    for _ in range(4):
        x, dy = torch.randn(16, 64), torch.randn(16, 32)
        layer(x).backward(dy)
        exact += dy.t() @ x
        of_fp8 += fp8(dy, E5M2).t() @ fp8(x)
    assert layer.weight.grad.residual is not None
    assert relative(layer.weight.grad, of_fp8) < 10 ** (-25 / 20)
    assert relative(layer.weight.grad, exact) < 10 ** (-22 / 20)


@LEVELS
def test_layer_used_twice(recipe, seed):
    layer, x = make(64, 64, recipe), torch.randn(8, 64)
    plain = nn.Linear(64, 64)
    plain.load_state_dict(layer.state_dict())
    for module in (layer, plain):
        module(torch.tanh(module(x))).square().sum().backward()
    assert isinstance(layer.weight.grad, ScaledTensor)
    assert relative(layer.weight.grad, plain.weight.grad) < 0.12


@LEVELS
@pytest.mark.filterwarnings("error")
def test_weight_computed_from_parameters(recipe, seed):
    def check(layer: nn.Module, y: Tensor) -> None:
        y.square().sum().backward()
        grads = [param.grad for param in layer.parameters()]
        assert y.isfinite().all() and all(grad is not None and grad.isfinite().all() for grad in grads)

    x = torch.randn(8, 64)
    pruned = make(64, 48, recipe)
    prune.random_unstructured(pruned, "weight", 0.5)
    check(pruned, pruned(x))
    normed = make(64, 48, recipe)
    expected = normed(x)
    weight_norm(normed)
    assert relative(normed(x), expected) < 0.05
    check(normed, normed(x))
    layer = make(64, 48, recipe)
    weight = layer.weight * 2
    y = functional_call(layer, {"weight": weight}, (x,))
    assert relative(y - layer.bias, 2 * (layer(x) - layer.bias)) < 1e-5
    check(layer, y)


@LEVELS
def test_gradient_of_a_functional_use_is_mended(recipe, seed):
    """The weight multiplied outside of the layer too: the sum of both gradients is stored in FP8."""
    layer, x = make(64, 64, recipe), torch.randn(8, 64)
    (layer(x) + F.linear(x, layer.weight)).sum().backward()
    assert isinstance(layer.weight.grad, ScaledTensor)
    assert relative(layer.weight.grad, 2 * torch.ones(8, 64).t() @ x) < 0.06


def test_autograd_grad_returns_the_gradient(seed):
    layer, x, dy = make(64, 32), torch.randn(8, 64, requires_grad=True), torch.randn(8, 32)
    dx, dw = torch.autograd.grad(layer(x), (x, layer.weight), dy)
    assert relative(dx, fp8(dy, E5M2) @ fp8(uncast(layer.weight))) < 1e-5
    assert relative(dw, dy.t() @ x) < 0.12 and layer.weight.grad is None


# --- E: scales, evaluation, recomputation


@pytest.mark.parametrize("recipe", [O1, O2, DELAYED], ids=["O1", "O2", "delayed"])
def test_E1_evaluation_changes_nothing(recipe, seed):
    layer = make(64, 32, recipe)
    before, state = layer.weight.detach().clone(), layer.state_dict()
    scales = scaling_state(layer) if recipe is DELAYED else []
    layer.eval()
    with torch.no_grad():
        for _ in range(5):
            layer(1000 * torch.randn(8, 64))
    layer.train()
    with torch.no_grad():  # validation by people who forget eval()
        layer(1000 * torch.randn(8, 64))
    assert same_bits(layer.weight, before)
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())
    assert not scales or equal_states(scaling_state(layer), scales)


@pytest.mark.parametrize("recipe", [O1, O2, DELAYED], ids=["O1", "O2", "delayed"])
def test_E2_frozen_layer_in_evaluation_passes_gradients(recipe, seed):
    base, adapter = make(64, 64, recipe).eval(), nn.Linear(64, 64)
    base.weight.requires_grad_(False)
    base.bias.requires_grad_(False)
    scales = scaling_state(base) if recipe is DELAYED else []
    x = torch.randn(8, 64)
    base(adapter(x)).square().sum().backward()
    assert adapter.weight.grad is not None and adapter.weight.grad.abs().sum() > 0
    assert base.weight.grad is None
    assert not scales or equal_states(scaling_state(base), scales)


def test_E3_scales_advance_although_the_first_layer_is_frozen(seed):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    model[0].requires_grad_(False)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), DELAYED)
    for _ in range(3):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer in model[1:]:
        for scaling in (layer.input_scaling, layer.grad_output_scaling):
            assert scaling.updates == 3 and (scaling.history[:3] > 0).all()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("recipe", [O1, O2, DELAYED], ids=["O1", "O2", "delayed"])
def test_E6_recomputation_changes_no_bit(recipe, reentrant, seed):
    """20 steps, so that delayed scales are past their warm-up."""

    def run(recompute: bool) -> list[Tensor]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
        result: list[Tensor] = []
        for _ in range(20 if recipe is DELAYED else 3):
            for _ in range(2):
                x = torch.randn(16, 32, requires_grad=True)
                y = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
                y.square().mean().backward()
            result += [y, x.grad, *(layer.weight.grad for layer in (model[0], model[2]))]
            optimizer.step()
            result += [param.detach().clone() for param in model.parameters()]
            if recipe is DELAYED:
                result += scaling_state(model[0]) + scaling_state(model[2])
            optimizer.zero_grad()
        return result

    assert all(same_bits(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_E7_recomputation_uses_the_same_recipe(seed, monkeypatch):
    layer, x = make(64, 32), torch.randn(16, 64, requires_grad=True)
    casts = count_casts(monkeypatch)
    y = checkpoint(layer, x, use_reentrant=False)
    forward = casts.count((16, 64))
    y.sum().backward()
    assert forward == 1 and casts.count((16, 64)) == 2


def test_E9_the_largest_micro_batch_counts(seed):
    layer = make(64, 32, DELAYED)
    for amax in (100.0, 1.0):
        x = torch.rand(8, 64) * 0.5
        x[0, 0] = amax
        layer(x).sum().backward()
    layer.update_scaling()
    assert layer.input_scaling.history[0] == 100


def test_E20_saved_tensors_on_another_device(seed):
    layer, x = make(64, 32), torch.randn(16, 64)
    layer(x).square().sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with torch.autograd.graph.save_on_cpu():
        y = layer(x).square().sum()
    y.backward()
    assert layer.weight.requires_grad and same_bits(layer.weight.grad, expected)


def test_delayed_scales_follow_the_past(seed):
    layer, x = make(64, 32, DELAYED), torch.randn(8, 64)
    for _ in range(16):
        layer(x).sum().backward()
        layer.update_scaling()
    with collect_stats(layer) as stats:
        layer(100 * x).sum().backward()
    assert stats[""]["input"]["saturated"] > 0, "the scale of the past is too large for this input"
    layer.update_scaling()
    with collect_stats(layer) as stats:
        layer(100 * x)
    assert stats[""]["input"]["saturated"] == 0


# --- counting


@LEVELS
def test_stats_count_every_cast(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    convert(model, recipe)
    x = torch.randn(8, 64) * torch.logspace(-8, 0, 64)
    for _ in range(2):
        model(x).sum().backward()  # a loop that accumulates, whose weights are in the cache now
    model.zero_grad()
    with collect_stats(model) as stats:
        for _ in range(2):
            model(x).sum().backward()
    assert set(stats) == {"0", "1"} and all(layer.stats is None for layer in model)
    first = stats["0"]
    assert {key: value["numel"] for key, value in first.items()} == {
        "input": 2 * 8 * 64,
        "weight": 64 * 96,
        "grad_output": 2 * 8 * 96,
        "grad": 64 * 96 if recipe is O1 else 2 * 64 * 96,
    }
    code = cast(x, E4M3)
    assert first["input"]["flushed"] == 2 * int(((code.codes.float() == 0) & (x != 0)).sum()) > 0
    assert all(counts["saturated"] == 0 for layer in stats.values() for counts in layer.values())


# --- copies, dtypes, devices


@LEVELS
def test_deepcopy_trains_in_fp8(recipe, seed):
    layer, x = make(64, 32, recipe), torch.randn(8, 64)
    layer(x).sum().backward()
    duplicate = copy.deepcopy(layer)
    assert "_octavo_cast" not in duplicate.weight.__dict__
    assert torch.equal(duplicate(x), layer(x))
    duplicate.zero_grad()
    duplicate(x).sum().backward()
    assert isinstance(duplicate.weight.grad, ScaledTensor)
    AdamW(duplicate.parameters(), lr=0.1, recipe=recipe).step()
    assert not torch.equal(duplicate(x), layer(x))


@LEVELS
@pytest.mark.parametrize("change", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double().float()])
def test_A12_casts_of_the_model_leave_codes_and_scales(recipe, change, seed):
    layer = make(64, 32, dataclasses.replace(recipe, name="d", scaling="delayed"))
    layer(torch.randn(8, 64)).sum().backward()
    layer.update_scaling()
    scales = scaling_state(layer)
    before = layer.weight.detach().clone()
    change(layer)
    assert equal_states(scaling_state(layer), scales)
    assert all(tensor.dtype != torch.float16 for key, tensor in layer.state_dict().items() if "scaling" in key)
    assert any("scaling" in key for key in layer.state_dict())
    if recipe is O2:
        assert same_bits(layer.weight.codes, before.codes) and same_bits(layer.weight.scale, before.scale)
    layer.float()
    layer.zero_grad()
    layer(torch.randn(8, 64)).sum().backward()
    assert isinstance(layer.weight.grad, ScaledTensor)
