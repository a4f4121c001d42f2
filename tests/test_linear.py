"""The three GEMMs of FP8Linear, for any shape, layout and value.

They are compared with the same products of operands that were cast and de-quantised by `octavo.tensor`, so the bound is the
rounding of a sum, not the error of FP8.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from fp8_layers import (
    DELAYED,
    LEVELS,
    fp8,
    make,
    relative,
    same_bits,
)
from torch import Tensor, nn

from octavo.convert import convert, initialize
from octavo.formats import E4M3, E5M2
from octavo.linear import FP8Linear, collect_stats, weight_operand
from octavo.optim import AdamW
from octavo.recipe import O1, O2, RECIPES, Recipe
from octavo.tensor import ScaledTensor, uncast


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


def test_fp16_gradients_beyond_the_range_show(seed):
    """A loss scale is too large then, and GradScaler has to see it."""
    layer = make(64, 48, O1).half()
    x = torch.full((32, 64), 16.0, dtype=torch.float16)
    layer(x).backward(torch.full((32, 48), 256.0, dtype=torch.float16))  # each element of the gradient is 2^17
    assert not uncast(layer.weight.grad, torch.float32).isfinite().any()


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


def test_backward_is_not_differentiated_twice(seed):
    """A penalty on a gradient has an error to show, and no gradient that is silently wrong."""
    layer, x = make(32, 16, O2), torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()


def test_nor_is_that_of_a_constant(seed):
    """The gradient of a sum does not depend on the gradient of the output, but on the weight."""
    layer, x = make(32, 16, O2), torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()
    layer(x).sum().backward(create_graph=True)  # allowed, if nobody goes on from there
    assert layer.weight.grad is not None


@pytest.mark.parametrize("move", ["to", "float", "share_memory", "dtype"])
@LEVELS
def test_what_hangs_on_a_weight_survives_a_move(recipe, move, seed):
    """`nn.Module` swaps the tensor under a parameter that is a subclass; hooks and attributes are the user's, and stay."""
    layer = make(64, 32, recipe)
    weight, seen = layer.weight, []
    weight.no_decay = True
    weight.register_hook(lambda grad: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    {
        "to": lambda: layer.to("cpu"),
        "float": layer.float,
        "share_memory": layer.share_memory,
        "dtype": lambda: layer.to(torch.float64).to(torch.float32),
    }[move]()
    layer(torch.randn(16, 64)).sum().backward()
    assert layer.weight is weight and weight.no_decay and sorted(seen) == ["accumulated", "gradient"]
    if layer.gradient_format is not None:
        assert isinstance(weight.grad, ScaledTensor)
