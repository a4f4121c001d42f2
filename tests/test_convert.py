"""convert, export, initialize: a model changes its precision and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.convert import convert, convert_report, export, initialize
from octavo.formats import E4M3
from octavo.linear import FP8Conv1D, FP8Linear, HeadLinear
from octavo.memory import memory_report
from octavo.optim import Adam, AdamW
from octavo.recipe import O1, O2, PAPER, RECIPES, Recipe
from octavo.tensor import ScaledTensor, uncast

DELAYED = dataclasses.replace(O2, name="delayed", scaling="delayed")
LEVELS = pytest.mark.parametrize("recipe", [O1, O2], ids=["O1", "O2"])


class GPT(nn.Module):
    """A small decoder with tied embeddings."""

    def __init__(self, tied: bool = True, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim, bias=False))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, 96, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(self.norm(x))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, bias: float = 0.0) -> float:
    """One step on a batch that depends on the seed alone; returns the loss."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, nn.Sequential):
        x = torch.randn(16, 64, generator=generator)
        loss = (model(x) - bias).square().mean()
    else:
        tokens = torch.randint(96, (4, 16), generator=generator)
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False))


def reasons(model: nn.Module) -> dict[str, str]:
    return {report.fqn: report.reason for report in convert_report(model) if not report.converted}


def converted(model: nn.Module) -> list[str]:
    return [report.fqn for report in convert_report(model) if report.converted]


def same_state(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


# --- what is converted


@LEVELS
def test_convert_changes_class_and_storage_only(recipe, seed):
    model = GPT().bfloat16()
    linear, weight, bias = model.blocks[0][1], model.blocks[0][1].weight, model.blocks[0][1].bias
    linear.bias.requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    calls = []
    linear.register_forward_hook(lambda *_: calls.append("forward"))
    linear.register_full_backward_hook(lambda *_: calls.append("backward"))
    weight.tag = "mine"
    weight.register_hook(lambda grad: calls.append("tensor"))
    assert convert(model, recipe) is model
    assert model.blocks[0][1] is linear and isinstance(linear, FP8Linear) and isinstance(linear, nn.Linear)
    assert linear.weight is weight and linear.bias is bias and weight.tag == "mine"
    assert [name for name, _ in model.named_parameters()] == names
    assert isinstance(weight, nn.Parameter) and isinstance(weight, ScaledTensor) == (recipe is O2)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert weight.requires_grad and not bias.requires_grad
    model(torch.randint(96, (2, 8))).sum().backward()
    assert sorted(calls) == ["backward", "forward", "tensor"]


def test_H1_weights_are_not_copied(seed):
    """O1 copies nothing; O2 needs FP16 codes, one weight at a time; dtypes stay."""
    model = GPT().half()
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    convert(model, O1)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    export(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    convert(model, O2)
    for name, param in model.named_parameters():
        assert param.dtype == torch.float16
        assert isinstance(param, ScaledTensor) or param.data_ptr() == addresses[name]
    assert model.blocks[0][1].weight.codes.nbytes == 2 * 64 * 128


def test_default_choice_and_its_reasons(seed):
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(96, 64),
            "tied": nn.Linear(64, 96, bias=False),
            "head": nn.Linear(64, 96),
            "layers": nn.ModuleList([nn.ModuleDict({"output": nn.Linear(64, 64), "score": nn.Linear(64, 64)})]),
            "moe": nn.ModuleDict({"gate": nn.Linear(64, 64), "experts": nn.ModuleList([nn.Linear(64, 64)])}),
            "mlp": nn.ModuleDict({"gate": nn.Linear(64, 64)}),
            "narrow": nn.Linear(64, 31),
            "conv": nn.Conv1d(64, 64, 3),
            "own": type("Own", (nn.Linear,), {})(64, 64),
            "wide": nn.Linear(64, 64).double(),
            "norm": nn.LayerNorm(64),
            "weight_norm": nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            "lazy": nn.LazyLinear(64),
        }
    )
    model["tied"].weight = model["embedding"].weight
    model["replaced"] = nn.Linear(64, 64)
    model["replaced"].forward = lambda x: x
    convert(model, O2)
    assert converted(model) == ["layers.0.output", "layers.0.score", "moe.experts.0", "mlp.gate"]
    found = reasons(model)
    for name, words in {
        "embedding": "embedding",
        "tied": "tied to embedding",
        "head": "output head",
        "moe.gate": "router",
        "narrow": "side under 32",
        "conv": "not a linear layer",
        "own": "subclass",
        "wide": "float64",
        "replaced": "forward was replaced",
        "lazy": "subclass",
    }.items():
        assert words in found[name], found
    assert "norm" not in found
    assert type(model["weight_norm"]).__name__ == "ParametrizedLinear"


def test_fused_experts_are_reported(seed):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up = nn.Parameter(torch.randn(4, 128, 64))

    model = nn.Sequential(nn.Linear(64, 64), Experts())
    convert(model, O2)
    assert "3-D" in reasons(model)["1"]


def test_filter_decides(seed):
    model = GPT()
    seen = []
    convert(model, O2, filter=lambda module, fqn: seen.append((type(module), fqn)) or fqn.startswith("blocks.0"))
    assert converted(model) == ["blocks.0.1", "blocks.0.3"]
    assert "filter" in reasons(model)["blocks.1.1"]
    assert {kind for kind, _ in seen} == {nn.Linear}


def test_B7_heads_of_ten_outputs_stay(seed):
    model = nn.Sequential(nn.Linear(768, 64), nn.Linear(64, 10))
    convert(model, O2)
    assert converted(model) == ["0"] and "(10, 64)" in reasons(model)["1"]
    model = nn.Sequential(nn.Linear(768, 10))
    convert(model, O2, filter=lambda module, fqn: True)
    x, y = torch.randn(5, 768), torch.randn(5, 10)
    model(x).backward(y)
    assert (uncast(model[0].weight.grad) - y.t() @ x).norm() < 0.12 * (y.t() @ x).norm()


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(64, bias=False), nn.LayerNorm(64, elementwise_affine=False), nn.RMSNorm(64), nn.Identity()],
    ids=["B22", "B23", "rms", "none"],
)
def test_B22_B23_norms_without_parameters(norm, seed):
    model = nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 64))
    kind = type(norm)
    convert(model, O2)
    assert type(model[1]) is kind and converted(model) == ["0", "2"]
    model(torch.randn(4, 64)).sum().backward()


@LEVELS
def test_B24_no_bias(recipe, seed):
    model = nn.Sequential(nn.Linear(32, 64, bias=False))
    convert(model, recipe)
    model(torch.randn(4, 32)).sum().backward()
    assert list(model.state_dict()) == ["0.weight"] and "bias=False" in repr(model)


class Conv1D(nn.Module):
    """As in transformers: y = x · weight + bias, weight [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / 8)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("recipe", [O1, O2, RECIPES["paper-3"]], ids=["O1", "O2", "E4M3"])
def test_conv1d_multiplies_as_the_linear_layer(recipe, seed):
    conv, linear = Conv1D(48, 80), nn.Linear(80, 48)
    linear.load_state_dict({"weight": conv.weight.detach().t(), "bias": conv.bias.detach()})
    models = [convert(nn.Sequential(layer), recipe) for layer in (conv, linear)]
    assert type(conv) is FP8Conv1D
    x, dy = torch.randn(7, 80), torch.randn(7, 48)
    inputs = [x.clone().requires_grad_() for _ in models]
    outputs = [model(leaf) for model, leaf in zip(models, inputs, strict=True)]
    for y in outputs:
        y.backward(dy)
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-5)
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    assert torch.allclose(uncast(conv.weight.grad), uncast(linear.weight.grad).t(), rtol=0.13, atol=0.05)
    assert "80, 48" in repr(conv)
    export(models[0])
    assert type(conv) is Conv1D


def test_octavo_models_linear_is_known(seed):
    from octavo.models.layers import Linear

    layer = Linear(64, 64)
    model = convert(nn.Sequential(layer), O2)
    assert converted(model) == ["0"]
    export(model)
    assert type(layer) is Linear


# --- converting again, nothing to convert, errors before anything changes


@LEVELS
def test_converting_twice(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    convert(model, recipe, filter=lambda module, fqn: fqn == "0")
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    convert(model, recipe)
    assert {name: (type(module), id(module)) for name, module in model.named_modules()} == before
    with pytest.raises(ValueError, match=r"'paper'.*export"):
        convert(model, "paper")
    assert converted(model) == ["0"]
    convert(model, recipe, filter=lambda module, fqn: True)
    assert converted(model) == ["0", "1", "2"]


def test_parts_then_the_whole(seed):
    model = GPT()
    for block in model.blocks:
        convert(block, O2)
    convert(model, O2)
    assert converted(model) == ["blocks.0.1", "blocks.0.3", "blocks.1.1", "blocks.1.3"]


def test_nothing_to_convert_is_an_error(seed):
    with pytest.raises(
        ValueError, match=r"would convert no layer of Sequential(.|\n)*0: its weight \(8, 64\)(.|\n)*1: Conv1d"
    ):
        convert(nn.Sequential(nn.Linear(64, 8), nn.Conv1d(64, 64, 3)), O2)
    with pytest.raises(ValueError, match="none"):
        convert(nn.ReLU(), O2)
    with pytest.raises(ValueError, match="no recipe is called 'O9'"):
        convert(mlp(), "O9")


def test_the_baseline_converts_nothing(seed):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    assert initialize(model, optimizer, "bf16") == (model, optimizer)
    assert converted(model) == [] and reasons(model)["blocks.0.1"] == "not given to convert"
    convert(model, O2)
    assert len(converted(model)) == 4


def test_weights_in_use_are_refused_before_anything_changes(seed):
    model = mlp()
    y = model[0].weight * 2
    view = model[2].weight.detach().view(-1)  # an alias of the memory alone does no harm
    saved = (model[2].weight.t() @ torch.randn(64, 3, requires_grad=True)).sum()
    with pytest.raises(ValueError, match="weights of 2 cannot change storage.*not run"):
        convert(model, O2)
    assert type(model[0]) is nn.Linear and type(model[2].weight) is nn.Parameter
    del y, saved
    convert(model, O2)
    assert len(view) == 64 * 128


def test_a_loss_that_lingers_does_no_harm(seed):
    """In a notebook the last loss is often alive; its graph was run and holds nothing but the accumulators."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(4, 64)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = initialize(model, optimizer, O2)
    step(model, optimizer, seed)


@LEVELS
def test_gradients_at_hand_are_carried_over(recipe, seed):
    model = mlp()
    model(torch.randn(4, 64)).sum().backward()
    expected = model[0].weight.grad.clone()
    convert(model, recipe)
    assert isinstance(model[0].weight.grad, ScaledTensor)
    assert (uncast(model[0].weight.grad) - expected).norm() < 0.05 * expected.norm()
    export(model)
    assert type(model[0].weight.grad) is Tensor


# --- back


@LEVELS
def test_export_gives_back_what_there_was(recipe, seed):
    model, reference = GPT(), GPT()
    reference.load_state_dict(model.state_dict())
    convert(model, recipe)
    values = model.state_dict()
    assert export(model) is model
    assert all(type(a) is type(b) for a, b in zip(model.modules(), reference.modules(), strict=True))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    assert all(set(a.__dict__) == set(b.__dict__) for a, b in zip(model.modules(), reference.modules(), strict=True))
    tokens = torch.randint(96, (2, 8))
    model(tokens).sum().backward()
    assert all(type(p.grad) is Tensor for p in model.parameters())
    assert torch.allclose(model(tokens), reference(tokens), rtol=0, atol=0 if recipe is O1 else 1e-2)
    convert(model, "paper")
    assert len(converted(model)) == 4


# --- checkpoints


@LEVELS
def test_F13_plain_and_converted_state_dicts_are_one(recipe, seed):
    plain, model = GPT(), convert(GPT(), recipe)
    state = plain.state_dict()
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state, strict=True)
    saved = model.state_dict()
    assert all(type(value) is Tensor and value.dtype == torch.float32 for value in saved.values())
    for name, value in saved.items():
        assert torch.allclose(value, state[name], rtol=2**-11, atol=1e-7)
    other = GPT()
    other.load_state_dict(saved, strict=True)
    assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items())
    again = convert(GPT(), recipe)
    again.load_state_dict(saved)
    assert same_state(again, model), "values survive the way through FP32 exactly"
    with pytest.raises(RuntimeError, match="size mismatch for blocks.0.1.weight"):
        model.load_state_dict({**state, "blocks.0.1.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match="Missing.*blocks.0.1.weight"):
        model.load_state_dict({name: value for name, value in state.items() if name != "blocks.0.1.weight"})
    assert isinstance(model.state_dict(keep_vars=True)["blocks.0.1.weight"], nn.Parameter)


@LEVELS
def test_load_with_assign(recipe, seed):
    with torch.device("meta"):
        model = GPT()
    convert(model, recipe)
    plain = GPT()
    model.load_state_dict(plain.state_dict(), assign=True)
    model.lm_head.weight = model.embedding.weight
    assert not any(param.is_meta for param in model.parameters())
    assert isinstance(model.blocks[0][1].weight, ScaledTensor) == (recipe is O2)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), recipe)
    model(torch.randint(96, (2, 8))).sum().backward()
    assert isinstance(model.blocks[0][1].weight.grad, ScaledTensor)


@pytest.mark.parametrize("recipe", [O1, O2, PAPER, RECIPES["paper-3"]], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_exact(recipe, dtype, seed):
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = GPT().to(dtype)
        return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), recipe)

    model, optimizer = fresh()
    for number in range(4):
        step(model, optimizer, seed + number)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = [step(model, optimizer, seed + number) for number in range(4, 8)]

    resumed, resumed_optimizer = fresh()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert [step(resumed, resumed_optimizer, seed + number) for number in range(4, 8)] == expected
    assert same_state(resumed, model)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        if isinstance(a, ScaledTensor):
            assert torch.equal(a.codes.float(), b.codes.float()) and torch.equal(a.scale, b.scale)


def test_delayed_scales_are_saved(seed):

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), DELAYED)

    model, optimizer = fresh()
    for number in range(20):
        step(model, optimizer, seed + number)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = [step(model, optimizer, seed + number) for number in range(20, 24)]
    resumed, resumed_optimizer = fresh()
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert [step(resumed, resumed_optimizer, seed + number) for number in range(20, 24)] == expected
    current = convert(mlp(), O2)
    current.load_state_dict(saved["model"])  # a layer without windows does not mind them
    resumed.load_state_dict(mlp().state_dict())  # nor does one with windows miss them


def test_E14_loaded_weights_do_not_meet_old_scales(seed):
    model, plain = mlp(), mlp()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), DELAYED)
    for number in range(20):
        step(model, optimizer, seed + number)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(100)
    model.load_state_dict(plain.state_dict())
    fresh = convert(mlp(), DELAYED)
    fresh.load_state_dict(plain.state_dict())
    x = torch.randn(16, 64)
    assert torch.equal(model(x), fresh(x))


def test_F12_no_jump_when_a_run_is_converted(seed):
    torch.manual_seed(seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(30):
        step(model, optimizer, seed + number % 4)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model, optimizer = initialize(model, optimizer, O2)
    for number in range(5):
        expected, loss = (step(m, o, seed + number % 4) for m, o in ((plain, plain_optimizer), (model, optimizer)))
        assert abs(loss / expected - 1) < (0.01 if number == 0 else 0.03)


def test_F14_checkpoints_do_not_grow(seed):
    model = mlp()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), DELAYED)

    def size() -> int:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.tell()

    step(model, optimizer, seed)
    first = size()
    for number in range(40):
        step(model, optimizer, seed + number)
    assert abs(size() - first) < 64


# --- copies


@LEVELS
def test_F17_deepcopy_is_independent(recipe, seed):
    model = convert(GPT(), recipe)
    tokens = torch.randint(96, (2, 8))
    duplicate = copy.deepcopy(model)
    assert torch.equal(duplicate(tokens), model(tokens))
    assert duplicate.lm_head.weight is duplicate.embedding.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, optimizer = initialize(duplicate, torch.optim.AdamW(duplicate.parameters(), lr=0.1), recipe)
    duplicate(tokens).sum().backward()
    assert isinstance(duplicate.blocks[0][1].weight.grad, ScaledTensor)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(duplicate(tokens), model(tokens))


@LEVELS
def test_average_of_weights(recipe, seed):
    model = mlp()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(3):
        step(model, optimizer, seed + number)
        average.update_parameters(model)
        for name, value in model.state_dict().items():
            expected[name] = value.clone() if number == 0 else (expected[name] + value) / 2
    for name, value in average.module.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-2, atol=1e-4)


def test_whole_modules_pickle(seed):
    model = convert(mlp(), O2)
    x = torch.randn(4, 64)
    y = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), y)


@LEVELS
def test_export_names_parametrizations_that_it_would_cut_off(recipe, seed):
    model = convert(GPT(), recipe)
    name, layer = next(
        (name, module) for name, module in model.named_modules() if isinstance(module, FP8Linear | HeadLinear)
    )
    if isinstance(layer.weight, ScaledTensor):
        layer = model.lm_head
        name = "lm_head"
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(ValueError, match=rf"{name} got a parametrization after convert.*remove_parametrizations"):
        export(model)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    export(model)
    assert not any(isinstance(module, FP8Linear | HeadLinear) for module in model.modules())


# --- tied weights


@LEVELS
def test_F19_tied_weights_stay_tied(recipe, seed, tmp_path):
    from safetensors.torch import load_file, save_model

    model = GPT()
    address = model.embedding.weight.data_ptr()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), recipe)
    assert model.lm_head.weight is model.embedding.weight and type(model.lm_head) is HeadLinear
    assert model.embedding.weight.data_ptr() == address
    step(model, optimizer, seed)
    assert len(optimizer.state) == len(list(model.parameters()))
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    export(model)
    save_model(model, str(tmp_path / "model.safetensors"))
    assert len(load_file(str(tmp_path / "model.safetensors"))) == len(state) - 1


@LEVELS
def test_F19_a_head_that_the_user_wants_in_fp8_stays_tied(recipe, seed):
    """The product is FP8, the parameter and the sum of both gradients stay plain, for the embedding reads rows of it."""
    model, plain = GPT(), GPT()
    plain.load_state_dict(model.state_dict())
    convert(model, recipe, filter=lambda module, fqn: True)
    assert isinstance(model.lm_head, FP8Linear) and model.lm_head.weight is model.embedding.weight
    assert type(model.embedding.weight) is nn.Parameter
    tokens = torch.randint(96, (2, 8))
    for m in (model, plain):
        m(tokens).square().sum().backward()
    grad, expected = model.embedding.weight.grad, plain.embedding.weight.grad
    assert type(grad) is Tensor and (grad - expected).norm() < 0.25 * expected.norm()
    assert "plain" in next(r.reason for r in convert_report(model) if r.fqn == "lm_head")


@LEVELS
def test_two_converted_layers_share_a_weight(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
    assert model[2].weight is model[0].weight and len(converted(model)) == 2
    losses = [step(model, optimizer, seed) for _ in range(5)]
    assert losses[-1] < losses[0]
    (model(torch.randn(4, 64))).sum().backward()
    assert isinstance(model[0].weight.grad, ScaledTensor)


# --- meta device, other wrappers


@LEVELS
def test_meta_device(recipe, seed):
    with torch.device("meta"):
        model = GPT(tied=False)
    convert(model, recipe)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02) if param.dim() > 1 else param.fill_(1.0)
    weight = model.blocks[0][1].weight
    assert isinstance(weight, ScaledTensor) == (recipe is O2)
    assert 0.015 < float(uncast(weight.detach()).std()) < 0.025
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), recipe)
    step(model, optimizer, seed)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_C9_wrappers_for_one_process_change_nothing(seed, process_group):
    results = []
    for wrapped in (False, True):
        torch.manual_seed(seed)
        model = mlp()
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), O1)
        runner = nn.parallel.DistributedDataParallel(model) if wrapped else model
        losses = []
        for number in range(3):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed + number))
            loss = runner(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, model.state_dict()))
    assert not any(value.is_meta for value in results[1][1].values())
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


@pytest.fixture
def process_group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@LEVELS
def test_H2_ddp_and_compile(recipe, seed, process_group):
    model = GPT()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
    runner = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    losses = []
    for _ in range(4):
        tokens = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(seed))
        loss = F.cross_entropy(runner(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        assert isinstance(model.blocks[0][1].weight.grad, ScaledTensor)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_F18_lora_on_an_fp8_base_resumes(seed):
    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(64, 8, bias=False)
            self.up = nn.Linear(8, 64, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(LoRA(nn.Linear(64, 64)), nn.GELU(), LoRA(nn.Linear(64, 64)))
        trainable = [param for param in model.parameters() if param.requires_grad]
        return initialize(model, torch.optim.AdamW(trainable, lr=1e-2), RECIPES["paper-3"])

    model, optimizer = fresh()
    assert converted(model) == ["0.base", "2.base"] and model[0].base.weight.format is E4M3
    for number in range(5):
        step(model, optimizer, seed + number, bias=1.0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = [step(model, optimizer, seed + number, bias=1.0) for number in range(5, 10)]
    resumed, resumed_optimizer = fresh()
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    assert [step(resumed, resumed_optimizer, seed + number, bias=1.0) for number in range(5, 10)] == expected


# --- initialize


@LEVELS
def test_initialize_takes_over_groups(recipe, seed):
    model = GPT()
    decay = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() == 1]
    lr = torch.tensor(0.02)
    old = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.3, "name": "matrices"}, {"params": rest, "lr": lr, "eps": 1e-6}],
        lr=0.01,
        betas=(0.8, 0.95),
        weight_decay=0.0,
        maximize=True,
    )
    calls = []
    old.register_step_post_hook(lambda *_: calls.append(1))
    model, new = initialize(model, old, recipe)
    assert type(new) is AdamW and new.recipe == recipe
    first, second = new.param_groups
    assert first["params"] == decay and second["params"] == rest
    assert (first["lr"], first["weight_decay"], first["betas"], first["eps"]) == (0.01, 0.3, (0.8, 0.95), 1e-8)
    assert (second["weight_decay"], second["eps"], first["name"]) == (0.0, 1e-6, "matrices") and second["lr"] is lr
    assert first["maximize"] and second["maximize"]
    assert {id(param) for group in new.param_groups for param in group["params"]} == {id(p) for p in model.parameters()}
    step(model, new, seed)
    assert calls == [1]
    with pytest.raises(RuntimeError, match="replaced: step the one that octavo.initialize returned"):
        old.step()


def test_initialize_takes_adam_with_l2(seed):
    model = mlp()
    model, optimizer = initialize(model, torch.optim.Adam(model.parameters(), weight_decay=0.1), O2)
    assert type(optimizer) is Adam and optimizer.param_groups[0]["weight_decay"] == 0.1
    model = mlp()
    stock = torch.optim.Adam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    assert type(initialize(model, stock, O2)[1]) is AdamW


def test_initialize_goes_on_where_the_stock_optimizer_was(seed):
    """Moments and step count are moved, in the formats of the recipe."""
    model = mlp()
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(5):
        step(model, old, seed + number)
    expected = {name: old.state[param]["exp_avg"].clone() for name, param in model.named_parameters()}
    model, new = initialize(model, old, O2)
    for name, param in model.named_parameters():
        state = new.state[param]
        assert float(state["step"]) == 5
        scale = state.get("exp_avg_scale")
        moment = state["exp_avg"].float()
        if scale is not None:
            moment = moment.view(-1) / scale.repeat_interleave(128)[: moment.numel()]
        assert (moment.view_as(expected[name]) - expected[name]).norm() < 0.05 * expected[name].norm()
    assert not old.state
    model(torch.randn(4, 64)).sum().backward()
    assert memory_report(model, new).bytes_per_parameter < 6.1, "moved states are stored in the formats of the recipe"


@pytest.mark.parametrize("attached", ["before", "after"])
def test_schedulers(attached, seed):
    model = mlp()
    old = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(old, lambda s: 0.5**s) if attached == "before" else None
    model, optimizer = initialize(model, old, O2)
    scheduler = scheduler or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            assert optimizer.param_groups[0]["lr"] == 0.5**number
            step(model, optimizer, seed)
            scheduler.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
        lambda p: torch.optim.NAdam(p, lr=1e-3),
        lambda p: torch.optim.Adafactor(p, lr=1e-2),
    ],
    ids=["SGD", "SGD-foreach", "RMSprop", "Adagrad", "NAdam", "Adafactor"],
)
def test_other_optimizers_work_with_O1_only(make, seed):
    model = mlp()
    optimizer = make(model.parameters())
    with pytest.raises(ValueError, match=f"{type(optimizer).__name__} cannot update weights.*O1"):
        initialize(model, optimizer, O2)
    assert type(model[0]) is nn.Linear
    model, same = initialize(model, optimizer, O1)
    assert same is optimizer
    losses = [step(model, optimizer, seed, bias=1.0) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_options_that_cannot_be_are_refused(seed):
    model = mlp()
    for option in ("amsgrad", "differentiable"):
        with pytest.raises(ValueError, match=f"{option}=True in parameter group 0"):
            initialize(model, torch.optim.AdamW(model.parameters(), **{option: True}), O2)
    with pytest.raises(ValueError, match=r"keeps recipe 'O2' and the model gets 'O1'"):
        initialize(model, AdamW(model.parameters(), recipe="O2"), O1)
    assert type(model[0]) is nn.Linear
    optimizer = AdamW(model.parameters(), recipe=O1)
    assert initialize(model, optimizer, O1)[1] is optimizer


def test_initialize_without_optimizer(seed):
    model = mlp()
    assert initialize(model, recipe=O2) == (model, None)
    assert len(converted(model)) == 2


def test_delayed_scales_move_with_the_optimizer(seed):
    model = mlp()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), DELAYED)
    for number in range(3):
        step(model, optimizer, seed + number)
    assert model[0].input_scaling.updates == model[2].grad_output_scaling.updates == 3


def test_a_skipped_step_leaves_delayed_scales(seed):
    model = mlp()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), DELAYED)
    step(model, optimizer, seed)
    scaling = model[0].input_scaling
    history, held = scaling.history.clone(), scaling.held.clone()
    for skipped in (1, 2):
        (model(100 * torch.randn(16, 64)).sum() * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped_steps == skipped
        assert torch.equal(scaling.history, history) and scaling.held == held and scaling.pending == 0
    step(model, optimizer, seed + 1)
    assert torch.equal(scaling.history[1:], history[:-1]) and 0 < scaling.history[0] < 50


def test_arguments_in_the_wrong_place_are_named(seed):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for wrong in [("O1", "O1"), ("O2",)]:
        with pytest.raises(TypeError, match=r"optimizer is 'O\d'.*initialize\(model, recipe"):
            initialize(model, *wrong)
    with pytest.raises(TypeError, match="model is a AdamW"):
        initialize(optimizer, model)
    for call in (convert, initialize):
        with pytest.raises(TypeError, match=r"filter is \['0'\].*lambda"):
            call(model, filter=["0"])
    assert not converted(model)


@LEVELS
def test_B13_strided_gradients_update_as_contiguous_ones(recipe, seed):
    """Gradients and parameters in any memory layout give the same step, bit for bit."""
    results = []
    big = torch.randn(64, 128)
    for strided in (False, True):
        torch.manual_seed(seed)
        base = torch.randn(64, 64)
        param = nn.Parameter(base.t() if strided else base.t().contiguous())
        layer = nn.Linear(64, 64, bias=False)
        layer.weight = param
        model = convert(nn.Sequential(layer), recipe)
        optimizer = AdamW(model.parameters(), lr=1e-2, recipe=recipe)
        for _ in range(3):
            grad = big[:, ::2]
            layer.weight.grad = grad if strided else grad.contiguous()
            optimizer.step()
        results.append(uncast(layer.weight.detach()).contiguous())
    assert torch.equal(*results)


@LEVELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_training_follows_the_plain_model(recipe, dtype, seed):
    def run(level: str | Recipe, dtype: torch.dtype) -> list[float]:
        torch.manual_seed(seed)
        model = GPT().to(dtype)
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), level)
        return [step(model, optimizer, seed + number % 4) for number in range(12)]

    plain, fp8 = run("bf16", torch.float32), run(recipe, dtype)
    assert fp8[-1] < fp8[0] and abs(fp8[-1] / plain[-1] - 1) < 0.05


def test_every_reported_layer_is_named_once(seed):
    model = convert(GPT(tied=False), O2)
    counts = Counter(report.fqn for report in convert_report(model))
    assert set(counts.values()) == {1} and set(itertools.islice(counts, 1)) == {"embedding"}
    assert str(convert_report(model)[0]).startswith("embedding: skipped, an embedding")


@LEVELS
def test_grad_scaler_skips_and_goes_on(recipe, seed):
    """FP16 autocast with a loss scale that is too large at first, and once in the middle."""
    model = mlp()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    x, losses, scales = torch.randn(16, 64), [], []
    for number in range(8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x) - 1).square().mean()
        scaler.scale(loss * (1e6 if number == 4 else 1)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert losses[5] == losses[4] and scales[4] == scales[3] / 2, "the step with infinite gradients was skipped"
    assert losses[-1] < losses[0]


def test_conversion_after_compilation(seed):
    """A model that was compiled before is compiled anew; one that is compiled can change dtype, load and be exported."""
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.randn(8, 64)).sum().backward()
    convert(model, O2)
    compiled(torch.randn(8, 64)).sum().backward()
    assert isinstance(model[0].weight.grad, ScaledTensor)
    model.bfloat16()
    model.zero_grad()
    compiled(torch.randn(8, 64, dtype=torch.bfloat16)).sum().backward()
    assert isinstance(model[0].weight.grad, ScaledTensor) and model[0].weight.grad.dtype == torch.bfloat16
    model.load_state_dict(model.state_dict())
    export(model)
    compiled(torch.randn(8, 64, dtype=torch.bfloat16)).sum().backward()
    assert type(model[0].weight) is nn.Parameter
