"""Models of Hugging Face transformers, built from small configs: convert, train, generate, save."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from octavo.convert import convert, convert_report, export, initialize
from octavo.linear import FP8Conv1D, FP8Linear
from octavo.recipe import O1, O2
from octavo.tensor import ScaledTensor

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

LEVELS = pytest.mark.parametrize("recipe", [O1, O2], ids=["O1", "O2"])
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def build(name: str, **options) -> nn.Module:
    """A model of random weights; `options` replace entries of its config."""
    import transformers

    if name == "GPT2":
        config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, **options)
        return transformers.GPT2LMHeadModel(config)
    if name == "Mixtral":
        options = {"num_local_experts": 4, "num_experts_per_tok": 2, **options}
    if name == "Qwen2":
        options = {"tie_word_embeddings": True, **options}
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def batch(seed: int) -> Tensor:
    return torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, recipe, seed: int, steps: int = 6) -> list[float]:
    model.train()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), recipe)
    tokens, losses = batch(seed), []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for module in model.modules():
            if isinstance(module, FP8Linear) and module.weight.grad is not None:
                assert isinstance(module.weight.grad, ScaledTensor)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@LEVELS
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen2", "Mixtral"])
def test_trains_like_the_plain_model(name, recipe, seed):
    torch.manual_seed(seed)
    model = build(name)
    plain = build(name)
    plain.load_state_dict(model.state_dict())
    for module in [*model.modules(), *plain.modules()]:
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    keys = list(model.state_dict())
    losses, expected = train(model, recipe, seed), train(plain, "bf16", seed)
    assert losses[-1] < losses[0]
    assert all(abs(a / b - 1) < 0.05 for a, b in zip(losses, expected, strict=True))
    assert list(model.state_dict()) == keys


def test_what_is_converted(seed):
    layers = {name: convert_report(convert(build(name), O2)) for name in ("Llama", "GPT2", "Qwen2", "Mixtral")}
    counts = {name: sum(layer.converted for layer in report) for name, report in layers.items()}
    assert counts == {"Llama": 2 * 7, "GPT2": 2 * 4, "Qwen2": 2 * 7, "Mixtral": 2 * 4}
    reasons = {name: {layer.fqn: layer.reason for layer in report} for name, report in layers.items()}
    assert "head" in reasons["Llama"]["lm_head"] and "tied to" in reasons["Qwen2"]["lm_head"]
    assert "tied to transformer.wte" in reasons["GPT2"]["lm_head"]
    experts = [reason for fqn, reason in reasons["Mixtral"].items() if fqn.endswith("experts")]
    assert len(experts) == 2 and all("3-D" in reason for reason in experts)
    assert all(not layer.converted for layer in layers["Mixtral"] if layer.fqn.endswith(".gate"))


def test_conv1d_of_gpt2(seed):
    model = build("GPT2").eval()
    plain = build("GPT2").eval()
    plain.load_state_dict(model.state_dict())
    convert(model, O2)
    layer = model.transformer.h[0].attn.c_attn
    assert type(layer) is FP8Conv1D and layer.weight.shape == (64, 192)
    tokens = batch(seed)
    with torch.no_grad():
        logits, expected = model(tokens).logits, plain(tokens).logits
    assert (logits - expected).norm() < 0.1 * expected.norm()
    model.load_state_dict(plain.state_dict(), strict=True)
    export(model)
    assert type(layer).__name__ == "Conv1D"


@LEVELS
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_generate(name, recipe, seed):
    model = convert(build(name), recipe).eval()
    tokens = batch(seed)[:, :8]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert first.shape == (2, 14) and torch.equal(first[:, :8], tokens)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0), first)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@LEVELS
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(recipe, reentrant, seed):
    torch.manual_seed(seed)
    model = build("Llama")
    other = build("Llama")
    other.load_state_dict(model.state_dict())
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        other.enable_input_require_grads()
    assert train(model, recipe, seed, steps=3) == train(other, recipe, seed, steps=3)


@LEVELS
def test_tied_embeddings_and_save_pretrained(recipe, seed, tmp_path):
    import transformers

    model = build("Qwen2")
    train(model, recipe, seed, steps=2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.eval()
    tokens = batch(seed)
    model.save_pretrained(tmp_path)
    loaded = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    again = convert(loaded, recipe).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


@LEVELS
def test_bf16_model(recipe, seed):
    model = build("Llama").to(torch.bfloat16)
    losses = train(model, recipe, seed)
    assert losses[-1] < losses[0] and {param.dtype for param in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_compiled_llama(seed):
    model = build("Llama", num_hidden_layers=1)
    eager = build("Llama", num_hidden_layers=1)
    eager.load_state_dict(model.state_dict())
    tokens = batch(seed)
    losses = []
    for candidate, compiled in ((eager, False), (model, True)):
        candidate, optimizer = initialize(candidate, torch.optim.AdamW(candidate.parameters(), lr=1e-3), O2)
        function = torch.compile(candidate, backend="aot_eager") if compiled else candidate
        for _ in range(2):
            loss = function(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-3
