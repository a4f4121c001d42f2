"""Whose moments are small: those of converted weights (O2), or of all matrices (the rows of Table 6)."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from octavo.convert import initialize
from octavo.formats import BF16, E4M3, FP16, FP32
from octavo.memory import memory_report
from octavo.models import Transformer, TransformerConfig
from octavo.optim import AdamW
from octavo.recipe import O2, PAPER, RECIPES, Recipe
from octavo.tensor import cast

ROWS = ["paper", "paper-2b", "paper-3", "paper-4"]
O2_MATRICES = replace(O2, name="O2 of matrices", moments_of="matrices")


def parameters(recipe: Recipe) -> dict[str, nn.Parameter]:
    """One parameter of each kind, with a gradient of its kind."""
    values = {
        "converted": cast(torch.randn(32, 48), recipe.master),
        "fp32 matrix": torch.randn(40, 24),
        "bf16 matrix": torch.randn(40, 24).bfloat16(),
        "convolution": torch.randn(8, 4, 3, 3),
        "vector": torch.randn(40),
        "number": torch.randn(()),
    }
    params = {name: nn.Parameter(value) for name, value in values.items()}
    for name, param in params.items():
        grad = torch.randn(param.shape)
        param.grad = cast(grad, E4M3) if name == "converted" else grad.to(param.dtype)
    return params


def moments(state: dict[str, Tensor]) -> tuple:
    """Dtypes of both moments, and shapes of their scales, None without."""
    scales = (state.get(f"{name}_scale") for name in ("exp_avg", "exp_avg_sq"))
    return state["exp_avg"].dtype, state["exp_avg_sq"].dtype, *(None if s is None else tuple(s.shape) for s in scales)


PLAIN = (FP32.dtype, FP32.dtype, None, None)


@pytest.mark.parametrize("recipe", [O2, O2_MATRICES, *(RECIPES[row] for row in ROWS)], ids=lambda recipe: recipe.name)
def test_formats_of_each_kind_of_parameter(seed, recipe):
    params = parameters(recipe)
    optimizer = AdamW(params.values(), recipe=recipe)
    optimizer.step()
    found = {name: moments(optimizer.state[param]) for name, param in params.items()}

    def small(numel: int) -> tuple:
        block = recipe.exp_avg_block
        return E4M3.dtype, recipe.exp_avg_sq.dtype, () if block is None else (-(-numel // block),), ()

    assert found["converted"] == small(32 * 48)
    for name, numel in (("fp32 matrix", 960), ("bf16 matrix", 960), ("convolution", 288)):
        assert found[name] == (small(numel) if recipe.moments_of == "matrices" else PLAIN)
    assert found["vector"] == found["number"] == PLAIN


def test_default_is_the_converted_alone():
    assert {name for name, recipe in RECIPES.items() if recipe.moments_of == "matrices"} == set(ROWS)


@pytest.mark.parametrize("recipe", [O2_MATRICES, PAPER], ids=lambda recipe: recipe.name)
def test_a_plain_matrix_with_small_moments_follows_fp32(seed, recipe):
    start, lr = torch.randn(64, 40), 1e-3
    mine, exact = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, other = AdamW([mine], lr=lr, recipe=recipe), torch.optim.AdamW([exact], lr=lr)
    for _ in range(20):
        mine.grad = torch.randn(64, 40) * 10 ** torch.empty(()).uniform_(-2, 0)
        exact.grad = mine.grad.clone()
        optimizer.step()
        other.step()
    assert mine.dtype == torch.float32
    assert (mine - exact).norm() < 0.1 * (exact - start).norm()  # three mantissa bits of m
    state, block = optimizer.state[mine], recipe.exp_avg_block or mine.numel()
    m = state["exp_avg"].float().view(-1, block) / state["exp_avg_scale"].view(-1, 1)
    v = state["exp_avg_sq"].float() / state["exp_avg_sq_scale"]
    for got, name in ((m, "exp_avg"), (v.square() if recipe.sqrt_exp_avg_sq else v, "exp_avg_sq")):
        want = other.state[exact][name]
        assert (got.view_as(want) - want).norm() < (0.15 if name == "exp_avg" else 0.01) * want.norm()


def test_a_row_without_gradient_leaps_where_its_second_moment_was_flushed(seed):
    """Why FP8 second moments harm embeddings: v of a rare token is 0 beside that of a frequent one, m is not, and m / ε is left."""
    moved = {}
    for row in ("paper", "paper-4"):
        table = nn.Parameter(torch.zeros(2, 32))
        optimizer = AdamW([table], lr=1e-3, weight_decay=0.0, recipe=row)
        for gradient in (torch.tensor([1.0, 1e-3]), torch.tensor([1.0, 0.0])):
            table.grad = gradient[:, None].expand(2, 32).contiguous()
            optimizer.step()
        moved[row] = table[1].abs().max().item()
    assert moved["paper"] < 2.5e-3 and moved["paper-4"] > 10


@pytest.mark.parametrize("recipe", [O2_MATRICES, *(RECIPES[row] for row in ROWS)], ids=lambda recipe: recipe.name)
def test_save_and_load_are_bitwise(seed, recipe):
    def bits(optimizer: AdamW) -> list[Tensor]:
        states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        parts = [part for p in params for part in ((p.codes, p.scale) if hasattr(p, "codes") else (p.detach(),))]
        return [t.contiguous().view(-1).view(torch.uint8).clone() for t in (*parts, *states)]

    params, fresh = parameters(recipe), parameters(recipe)
    optimizer, loaded = (AdamW(group.values(), lr=1e-2, recipe=recipe) for group in (params, fresh))
    for _ in range(3):
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for mine, theirs in zip(fresh.values(), params.values(), strict=True):
            mine.copy_(theirs.detach())
            mine.grad = theirs.grad
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(3):
        assert all(map(torch.equal, bits(loaded), bits(optimizer)))
        loaded.step()
        optimizer.step()


def test_a_state_of_other_parameters_is_refused(seed):
    params = parameters(PAPER)
    optimizer = AdamW(params.values(), recipe=PAPER)
    optimizer.step()
    other = AdamW(params.values(), recipe=replace(PAPER, name="mine", moments_of="converted"))
    with pytest.raises(ValueError, match=r"saved with .*FP16 of all matrices, but recipe 'mine' keeps .*FP16: build"):
        other.load_state_dict(optimizer.state_dict())


def test_a_stock_state_is_moved_into_them(seed):
    """`initialize` with an optimizer that has stepped."""
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.arange(50)).square().sum().backward()
        old.step()
        old.zero_grad()
    expected = {name: old.state[param]["exp_avg_sq"].clone() for name, param in model.named_parameters()}
    model, new = initialize(model, old, PAPER)
    for name, param in model.named_parameters():
        state = new.state[param]
        assert moments(state) == (PLAIN if param.dim() < 2 else (E4M3.dtype, FP16.dtype, (), ()))
        got = state["exp_avg_sq"].float() / state.get("exp_avg_sq_scale", torch.ones(()))
        assert (got - expected[name]).norm() <= FP16.eps * expected[name].norm()
    model(torch.arange(50)).square().sum().backward()
    new.step()
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(("name", "each"), [("O2", 8), ("paper", 3), ("paper-4", 2)])
def test_memory_report_counts_them(seed, name, each):
    """Bytes of the moments of embedding and head, to the byte: `each` an element, two scales where they are small."""
    config = TransformerConfig("gpt", 128, 1, 4, vocab_size=250, max_seq_len=64)
    model = Transformer.build(config, RECIPES[name], seed=seed)
    optimizer = AdamW(model.parameters(), recipe=name)
    tokens = torch.randint(250, (2, 2, 64))
    model(tokens[0], tokens[1]).backward()
    optimizer.step()
    tables, vectors = 2 * 256 * 128, 6 * 128
    others = 8  # embedding, head and six vectors each have a step
    scales = 0 if name == "O2" else 2 * 2 * 4
    assert memory_report(model, optimizer).by_kind["other states"] == each * tables + 8 * vectors + 4 * others + scales


@pytest.mark.parametrize("master", [FP16, BF16])
def test_norms_and_biases_stay_torch(seed, master):
    """With all matrices small, a vector's update is that of FP32 AdamW."""
    recipe = replace(PAPER, name="mine", master=master)
    params = parameters(recipe)
    vector = params["vector"]
    exact = nn.Parameter(vector.detach().clone())
    exact.grad = vector.grad.clone()
    optimizer, other = AdamW(params.values(), recipe=recipe), torch.optim.AdamW([exact])
    for _ in range(10):
        optimizer.step()
        other.step()
    torch.testing.assert_close(vector, exact, rtol=1e-5, atol=1e-6)
