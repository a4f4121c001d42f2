"""Hints of scales: every cast with current scaling gets the one of its layer, and nothing but speed depends on them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from fp8_layers import LEVELS, make, same_bits
from torch import Tensor, nn

from octavo.convert import convert, initialize
from octavo.kernels import reference
from octavo.linear import FP8Linear
from octavo.models import Transformer, TransformerConfig
from octavo.recipe import O2


@pytest.fixture
def hints_seen(monkeypatch) -> list[int]:
    """Addresses of the hints that casts get from now on."""
    seen: list[int] = []

    def spied(function: Callable) -> Callable:
        def call(*args, hint: Tensor | None = None, **kwargs):
            if hint is not None:
                assert hint.dtype == torch.int32 and hint.shape == ()
                seen.append(hint.data_ptr())
            return function(*args, hint=hint, **kwargs)

        return call

    for name in ("quantize", "cast_current", "activation_quantize", "rotary_backward_quantize"):
        monkeypatch.setattr(reference, name, spied(getattr(reference, name)))
    return seen


def addresses(model: nn.Module) -> list[tuple[int, ...]]:
    """Of the hints of each layer: input, grad_output, grad."""
    return [tuple(hint.data_ptr() for hint in m.hints) for m in model.modules() if isinstance(m, FP8Linear)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_each_cast_has_the_hint_of_its_layer(backend, hints_seen, seed):
    """Compiled, too, it is the memory of the layer that a kernel writes to, and blocks share one graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = nn.Sequential(*(Block() for _ in range(3)))
    convert(model, O2)
    counter = CompileCounterWithBackend(backend or "eager")
    if backend is not None:
        for block in model:
            block.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert counter.frame_count == (backend is not None)
    assert sorted(hints_seen) == sorted([hint for layer in addresses(model) for hint in layer] * 2)


@pytest.mark.parametrize("dialect", ["gpt", "llama"])
@pytest.mark.parametrize("compiled", [False, True])
def test_fused_blocks_use_the_same_hints(compiled, dialect, hints_seen, seed):
    """All but those of inputs that a norm makes, whose maximum is known before they are cast."""
    torch._dynamo.reset()
    config = TransformerConfig(
        dialect, 64, n_layers=2, n_heads=4, vocab_size=256, max_seq_len=48, ffn_dim=144, fused=True
    )
    model = Transformer.build(config, O2, seed=seed)
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    model(torch.randint(64, (2, 16))).float().sum().backward()
    known = {m.hints.input.data_ptr() for n, m in model.named_modules() if n.endswith(("qkv", "up", "gate_up"))}
    assert set(hints_seen) == {hint for layer in addresses(model) for hint in layer} - known
    assert len(hints_seen) == len(set(hints_seen))


@LEVELS
def test_hints_are_no_state(recipe, seed):
    layer = make(64, 32, recipe)
    keys = set(layer.state_dict())
    for hint in layer.hints:
        hint.fill_(7)
    assert not any("hint" in key for key in keys) and not list(layer.buffers())
    for other in (copy.deepcopy(layer), reloaded(layer)):
        assert all(hint == 0 for hint in other.hints)
        assert not {h.data_ptr() for h in other.hints} & {h.data_ptr() for h in layer.hints}
    layer.load_state_dict(layer.state_dict())
    assert all(hint == 7 for hint in layer.hints)
    layer.half()
    assert all(hint.dtype == torch.int32 and hint == 7 for hint in layer.hints)
    layer.release()
    assert not hasattr(layer, "hints")


def reloaded(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_hints_follow_the_weight(seed):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32))
    convert(model, O2)
    assert {hint.device.type for hint in model[0].hints} == {"meta"}
    model.to_empty(device="cpu")
    assert {hint.device.type for hint in model[0].hints} == {"cpu"}
    assert all(hint == 0 for hint in model[0].hints)


def test_no_result_depends_on_a_hint(seed):
    def run(word: int) -> list[Tensor]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), O2)
        for layer in (model[0], model[2]):
            for hint in layer.hints:
                hint.fill_(word)
        for _ in range(3):
            model(torch.randn(16, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.state_dict().values())

    assert all(same_bits(one, other) for one, other in zip(run(0), run(-1), strict=True))
