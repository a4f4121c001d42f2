"""FP8Linear: what it computes, what it keeps, and when its scales move.

The three GEMMs are compared with the same products of operands that were cast and de-quantised by `octavo.tensor`, so the bound is the
rounding of a sum, not the error of FP8.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo import kernels
from octavo.convert import convert, initialize
from octavo.formats import E4M3, E5M2, Format
from octavo.linear import FP8Linear, collect_stats, drop_weight_cache, weight_operand
from octavo.optim import AdamW
from octavo.recipe import O1, O2, RECIPES, Recipe
from octavo.tensor import ScaledTensor, cast, uncast

DELAYED = dataclasses.replace(O2, name="delayed", scaling="delayed")
LEVELS = pytest.mark.parametrize("recipe", [O1, O2], ids=["O1", "O2"])


def always(module: nn.Module, fqn: str) -> bool:
    return True


def make(k: int, n: int, recipe: str | Recipe = O2, bias: bool = True, dtype: torch.dtype = torch.float32) -> FP8Linear:
    layer = convert(nn.Linear(k, n, bias=bias, dtype=dtype), recipe, filter=always)
    assert isinstance(layer, FP8Linear)
    return layer


def fp8(x: Tensor, fmt: Format = E4M3) -> Tensor:
    """Real values of the cast of x."""
    return uncast(cast(x.detach().float(), fmt))


def relative(x: Tensor, reference: Tensor) -> float:
    x, reference = uncast(x.detach()).double(), uncast(reference.detach()).double()
    return float((x - reference).norm() / reference.norm().clamp_min(1e-30))


def same_bits(x: Tensor, y: Tensor) -> bool:
    x, y = x.detach(), y.detach()
    if isinstance(x, ScaledTensor) and isinstance(y, ScaledTensor):
        return same_bits(x.codes, y.codes) and same_bits(x.scale, y.scale)
    return x.dtype == y.dtype and torch.equal(as_bytes(x), as_bytes(y))


def as_bytes(x: Tensor) -> Tensor:
    return uncast(x).reshape(-1).contiguous().view(torch.uint8)


def check_gemms(layer: FP8Linear, x: Tensor, dy: Tensor) -> None:
    """Forward and backward against the products of the de-quantised operands."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    k = x.shape[-1]
    w, flat, flat_dy = fp8(uncast(layer.weight.detach())), fp8(x).reshape(-1, k), fp8(dy, E5M2).reshape(-1, y.shape[-1])
    expected = F.linear(fp8(x), w, layer.bias)
    assert y.shape == expected.shape and y.dtype == x.dtype and y.is_contiguous()
    assert relative(y, expected) < 1e-5
    assert x.grad is not None and x.grad.shape == x.shape
    assert relative(x.grad.reshape(-1, k), flat_dy @ w) < 1e-5
    # wgrad is computed in BF16, then stored in E4M3
    assert isinstance(layer.weight.grad, ScaledTensor) and layer.weight.grad.format is E4M3
    assert relative(layer.weight.grad, fp8((flat_dy.t() @ flat).bfloat16())) < 1e-2
    if layer.bias is not None:
        assert torch.allclose(layer.bias.grad, dy.reshape(-1, y.shape[-1]).sum(0), rtol=1e-5, atol=1e-5)


# --- the three GEMMs


@LEVELS
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 3, 4, 64)], ids=str)
def test_gemms_for_inputs_of_one_to_four_dims(recipe, shape, seed):
    check_gemms(make(64, 48, recipe), torch.randn(shape), torch.randn(*shape[:-1], 48))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.converts])
def test_every_recipe(name, seed):
    check_gemms(make(40, 56, name), 3 * torch.randn(9, 40), 1e-4 * torch.randn(9, 56))


@LEVELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_the_user(recipe, dtype, seed):
    layer = make(64, 32, recipe, dtype=dtype)
    assert layer.weight.dtype == layer.bias.dtype == dtype
    x = torch.randn(16, 64, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    assert relative(y, F.linear(fp8(x), fp8(uncast(layer.weight.detach())), layer.bias.float())) < 1e-2


@LEVELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_sets_the_output(recipe, dtype, seed):
    layer, x = make(64, 32, recipe), torch.randn(8, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == dtype and x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert relative(y, layer(x)) < 1e-2


def test_autocast_does_not_round_fp32_gemms(seed):
    """A backward pass inside of autocast gives the same gradients as outside."""
    layer, x = make(64, 32, O1), torch.randn(8, 64, requires_grad=True)
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    y = layer(x).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.backward()
    assert torch.equal(x.grad, expected)


def test_plain_gradients_on_request(seed):
    """A recipe with grad=None leaves plain gradients, computed in the dtype of the parameter."""
    layer = make(64, 32, dataclasses.replace(O1, name="plain-grad", grad=None))
    x, dy = torch.randn(16, 64), torch.randn(16, 32)
    layer(x).backward(dy)
    assert type(layer.weight.grad) is Tensor
    assert relative(layer.weight.grad, fp8(dy, E5M2).t() @ fp8(x)) < 1e-6


def test_wrong_inputs_are_named():
    layer = make(64, 32)
    with pytest.raises(ValueError, match=r"\[\.\.\., 64\].*float32 \(3, 63\)"):
        layer(torch.randn(3, 63))
    with pytest.raises(ValueError, match="int64"):
        layer(torch.ones(3, 64, dtype=torch.int64))
    with pytest.raises(ValueError):
        layer(torch.tensor(1.0))


# --- B: shapes, layouts, sizes


@LEVELS
def test_B1_sizes_that_no_tensor_core_takes(recipe, seed):
    check_gemms(make(71, 89, recipe), torch.randn(409, 71), torch.randn(409, 89))


@LEVELS
def test_B2_one_token(recipe, seed):
    layer = make(256, 512, recipe)
    check_gemms(layer, torch.randn(1, 256), torch.randn(1, 512))
    x = torch.randn(256)
    assert torch.equal(layer(x), layer(x[None])[0])


def test_B4_767_features(seed):
    check_gemms(make(767, 48), torch.randn(20, 767), torch.randn(20, 48))


@LEVELS
@pytest.mark.parametrize("tokens", [1, 3, 15, 17, 27])
def test_B5_any_number_of_tokens_in_backward(recipe, tokens, seed):
    check_gemms(make(32, 48, recipe), torch.randn(tokens, 32), torch.randn(tokens, 48))


def test_B6_one_output_feature(seed):
    check_gemms(make(64, 1), torch.randn(1843, 64), torch.randn(1843, 1))
    assert not isinstance(convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), O2)[1], FP8Linear)


@LEVELS
@pytest.mark.parametrize("splits", [[33, 0, 7, 88], [5, 3, 0]], ids=["B8", "C2"])
def test_B8_C2_expert_splits(recipe, splits, seed):
    experts = nn.ModuleList(make(64, 96, recipe) for _ in splits)
    x, dy = torch.randn(sum(splits), 64), torch.randn(sum(splits), 96)
    y = torch.cat([expert(part) for expert, part in zip(experts, x.split(splits), strict=True)])
    y.backward(dy)
    for expert, part, dy_part in zip(experts, x.split(splits), dy.split(splits), strict=True):
        assert expert.weight.grad.shape == (96, 64)
        if len(part):
            assert relative(expert.weight.grad, fp8(dy_part, E5M2).t() @ fp8(part)) < 0.04
        else:
            assert not uncast(expert.weight.grad).any()


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_B11_eager_and_compiled_agree(backend, seed):
    layer, x = make(32, 24), torch.randn(16, 32)
    assert same_bits(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))


@LEVELS
def test_B15_strided_inputs_and_gradients(recipe, seed):
    layer = make(64, 32, recipe)
    x = torch.randn(2, 64, 8, 16).transpose(1, 2).transpose(2, 3)  # [2, 8, 16, 64] with features far apart
    dy = torch.randn(32, 2, 8, 16).permute(1, 2, 3, 0)
    assert not x.is_contiguous() and not dy.is_contiguous()
    check_gemms(layer, x, dy)
    check_gemms(layer, torch.randn(64).expand(3, 5, 64), torch.ones(()).expand(3, 5, 32))
    check_gemms(layer, torch.randn(40, 128)[:, ::2], torch.randn(40, 33)[:, 1:])


# --- C: no tokens


@LEVELS
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
def test_C1_no_tokens(recipe, shape, seed):
    layer, x = make(64, 128, recipe), torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 128) and y.requires_grad
    y.sum().backward()
    assert layer.weight.grad.shape == (128, 64) and not uncast(layer.weight.grad).any()
    assert not layer.bias.grad.any() and x.grad.shape == x.shape
    assert isinstance(layer.weight.grad, ScaledTensor)


def test_C5_no_tokens_in_evaluation():
    layer = make(64, 32).eval()
    with torch.no_grad():
        assert layer(torch.zeros(0, 64)).shape == (0, 32)


# --- A: zero, infinity, NaN


@LEVELS
def test_A2_row_of_zeros_through_an_adapter_of_zeros(recipe, seed):
    """LoRA with B = 0 and a padding token: everything stays finite and the zero row stays zero."""
    layer, down, up = make(64, 64, recipe, bias=False), make(64, 8, recipe, bias=False), make(8, 64, recipe, bias=False)
    with torch.no_grad():
        up.weight.zero_()
    x = torch.randn(8, 64)
    x[3] = 0
    y = layer(x) + up(down(x))
    y.square().sum().backward()
    assert not y[3].any() and y.isfinite().all()
    assert all(uncast(module.weight.grad).isfinite().all() for module in (layer, down, up))


@LEVELS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_A8_bad_output_gradient_shows_in_the_gradients(recipe, bad, seed):
    layer, x = make(64, 32, recipe), torch.randn(8, 64, requires_grad=True)
    before = layer.weight.detach().clone()
    dy = torch.randn(8, 32)
    dy[2, 5] = bad
    layer(x).backward(dy)
    assert uncast(layer.weight.grad).isnan().all() and layer.weight.grad.scale.isfinite()
    assert x.grad.isnan().any()
    optimizer = AdamW(layer.parameters(), recipe=recipe)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1 and same_bits(layer.weight, before)


@LEVELS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["input", "weight"])
def test_A8_bad_operand_shows_in_the_output(recipe, bad, where, seed):
    layer, x = make(64, 32, recipe), torch.randn(8, 64)
    with torch.no_grad():
        (x if where == "input" else layer.weight)[2, 5] = bad
    y = layer(x)
    assert y.isnan().any()
    y.sum().backward()
    assert uncast(layer.weight.grad).isnan().any() == (where == "input")


def test_A8_bad_sum_of_micro_batches_stays_bad(seed):
    layer, x = make(64, 32), torch.randn(8, 64)
    layer(x).sum().backward()
    (layer(x).sum() * float("inf")).backward()
    layer(x).sum().backward()
    assert uncast(layer.weight.grad).isnan().all()


def test_A8_delayed_scales_do_not_hide_infinities(seed):
    layer = make(64, 32, DELAYED)
    x = torch.randn(8, 64)
    for _ in range(20):
        layer(x).sum().backward()
        layer.update_scaling()
    assert layer(x).isfinite().all()
    x[0, 0] = float("inf")
    assert layer(x).isnan().all()


@LEVELS
def test_A11_scales_stay_fp32(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), recipe)
    for _ in range(2):
        model(torch.randn(8, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert all(layer.weight.grad.scale.dtype == torch.float32 for layer in model)
        optimizer.zero_grad()
    if recipe is O2:
        assert all(layer.weight.scale.dtype == torch.float32 for layer in model)
    assert all(operand_scale(layer).dtype == torch.float32 for layer in model)


def operand_scale(layer: FP8Linear) -> Tensor:
    return weight_operand(layer.weight, E4M3).scale


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [O2, DELAYED], ids=["current", "delayed"])
def test_A16_wild_initialisation(recipe, seed):
    """Weights ten times too large: no NaN in 40 steps, the loss follows FP32, and what casts lose is counted."""

    def build() -> nn.Module:
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
        model = nn.Sequential(nn.Linear(32, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 32))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.mul_(10)
        return model

    def run(level: str | Recipe) -> tuple[list[float], dict]:
        model = build()
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)
        losses, stats = [], {}
        generator = torch.Generator().manual_seed(seed)
        for step in range(40):
            x = torch.randn(64, 32, generator=generator)
            # step 16 is the first with delayed scales from the past
            with collect_stats(model) if step == 17 else contextlib.nullcontext(stats) as stats:
                loss = F.mse_loss(model(x), x.flip(1))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, stats

    expected, _ = run("bf16")
    losses, stats = run(recipe)
    assert all(loss == loss for loss in losses)
    assert losses[-1] < losses[0] and abs(losses[-1] / expected[-1] - 1) < 0.2
    assert sum(counts["grad_output"]["flushed"] + counts["input"]["flushed"] for counts in stats.values()) > 0


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


def count_casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the matrices that are cast from now on."""
    shapes: list[tuple[int, ...]] = []
    original = kernels.cast_transpose

    def spy(x: Tensor, *args, **kwargs):
        shapes.append(tuple(x.shape))
        return original(x, *args, **kwargs)

    monkeypatch.setattr(kernels, "cast_transpose", spy)
    return shapes


@LEVELS
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_weight_is_cast_once_per_optimizer_step(recipe, recompute, seed, monkeypatch):
    layer = make(64, 96, recipe)
    optimizer = AdamW(layer.parameters(), recipe=recipe)
    casts = count_casts(monkeypatch)
    for step in range(1, 4):
        for _ in range(4):
            x = torch.randn(8, 64, requires_grad=True)
            (checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)).sum().backward()
        assert casts.count((96, 64)) == step
        optimizer.step()
        optimizer.zero_grad()


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
    layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
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


def scaling_state(layer: FP8Linear) -> list[Tensor]:
    return [
        tensor.clone()
        for scaling in (layer.input_scaling, layer.grad_output_scaling)
        for tensor in scaling.state_dict().values()
    ]


def equal_states(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
    model(x)  # the weights are in the cache now
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


# --- compiled


@LEVELS
def test_H3_compiles_without_a_break(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.Linear(64, 33, bias=False))
    convert(model, recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 64, requires_grad=True)
    results = []
    for function in (model, compiled):
        for _ in range(2):  # two micro-batches
            y = function(x)
            y.square().sum().backward()
        grads = [layer.weight.grad for layer in model if isinstance(layer, FP8Linear)]
        assert all(isinstance(grad, ScaledTensor) and grad.residual is not None for grad in grads)
        results.append([y, x.grad, *grads])
        model.zero_grad()
        x.grad = None
    assert all(same_bits(eager, other) for eager, other in zip(*results, strict=True))


@pytest.mark.slow
def test_H3_compiles_with_inductor(seed):
    layers = [make(64, 48, recipe) for recipe in (O1, O2)]
    x = torch.randn(8, 64, requires_grad=True)
    results = []
    for compiled in (False, True):
        function = torch.compile(layers_sum, fullgraph=True) if compiled else layers_sum
        function(layers, x).square().sum().backward()
        assert all(isinstance(layer.weight.grad, ScaledTensor) for layer in layers)
        results.append([x.grad, *(layer.weight.grad for layer in layers)])
        x.grad = layers[0].weight.grad = layers[1].weight.grad = None
    assert all(relative(other, eager) < 1e-2 for eager, other in zip(*results, strict=True))


def layers_sum(layers: list[FP8Linear], x: Tensor) -> Tensor:
    return layers[0](x) + layers[1](x)


@LEVELS
def test_compiled_frozen_weight(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.requires_grad_(False)
    convert(model, recipe)
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(8, 64)).sum().backward()
    assert isinstance(model[0].weight.grad, ScaledTensor) and model[1].weight.grad is None


def test_compiled_trains_as_eager(seed):
    def run(compiled: bool) -> list[float]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), O2)
        function = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        losses = []
        for _ in range(5):
            x = torch.randn(16, 32)
            loss = F.mse_loss(function(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert run(False) == run(True)


def test_compiled_with_delayed_scales(seed):
    """The same windows as in eager mode, and two compilations: one for the warm-up and one for after it."""

    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), DELAYED)
        function = torch.compile(model, backend=counting_backend, fullgraph=True) if compiled else model
        for _ in range(18):
            x = torch.randn(16, 32)
            F.mse_loss(function(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return scaling_state(model[0]) + scaling_state(model[2])

    compilations.clear()
    assert equal_states(run(False), run(True))
    assert len(compilations) == 2


compilations: list[int] = []


def counting_backend(graph, inputs):
    from torch._dynamo.backends.debugging import aot_eager

    compilations.append(1)
    return aot_eager(graph, inputs)


@LEVELS
def test_compiling_again_between_micro_batches(recipe, seed):
    """Dynamo cannot trace a parameter whose gradient is stored differently, so gradients hide while it traces."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64))
    convert(model, recipe)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=counting_backend, fullgraph=True)
    compilations.clear()
    for tokens in (8, 8, 9, 24, 8):
        x = torch.randn(tokens, 64)
        for function in (compiled, eager):
            function(x).sum().backward()
    assert len(compilations) == 2, "one for eight tokens, one for any number"
    for layer, other in zip(model, eager, strict=True):
        if isinstance(layer, FP8Linear):
            assert same_bits(layer.weight.grad, other.weight.grad)


def test_compiled_steps_compile_once(seed):
    """Optimizer steps, evaluation in between and counting change no guard of the compiled function."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64))
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), O2)
    compiled = torch.compile(model, backend=counting_backend, fullgraph=True)
    compilations.clear()
    for step in range(5):
        compiled(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(torch.randn(3, 64))
        model.train()
    assert len(compilations) == 1
    with collect_stats(model) as stats:
        compiled(torch.randn(8, 64)).sum().backward()
    assert stats["0"]["grad_output"]["numel"] == stats["0"]["input"]["numel"] == 8 * 64


@LEVELS
def test_inference_mode_then_training(recipe, seed):
    layer, x = make(64, 32, recipe), torch.randn(8, 64)
    with torch.inference_mode():
        y = layer(x)
    z = layer(x)
    assert torch.equal(y, z)
    z.sum().backward()
    assert isinstance(layer.weight.grad, ScaledTensor)
