"""A model of transformers behind the trainer's interface: its own logits and loss, in mixed precision, compiled block by block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hf_models import VOCAB, random_model

from octavo.convert import convert, convert_report
from octavo.hf import CausalLM


def test_loss_leaves_out_what_is_ignored(seed: int) -> None:
    model = CausalLM(random_model("qwen2"), torch.float32)
    tokens, targets = torch.randint(VOCAB, (2, 2, 20))
    targets[0, ::2] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert torch.equal(model(tokens, targets), expected)
    assert model.vocab_size == VOCAB and model.max_seq_len == 64


def test_products_are_bf16_and_parameters_fp32(seed: int) -> None:
    model = CausalLM(random_model("llama"), torch.bfloat16)
    tokens = torch.randint(VOCAB, (2, 20))
    logits, exact = model(tokens), CausalLM(model.model, torch.float32)(tokens)
    assert logits.dtype == torch.bfloat16 and exact.dtype == torch.float32
    assert 1e-4 < (logits.float() - exact).norm() / exact.norm() < 0.05
    model(tokens, tokens).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_fp8_layers_are_those_of_the_blocks(seed: int) -> None:
    model = convert(CausalLM(random_model("mistral"), torch.float32), "O2")
    converted = {layer.fqn for layer in convert_report(model) if layer.converted}
    assert len(converted) == 14 and all(".layers." in fqn for fqn in converted)
    assert model(torch.randint(VOCAB, (1, 8)), torch.randint(VOCAB, (1, 8))).isfinite()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_blocks_are_compiled(name: str, seed: int) -> None:
    model = CausalLM(random_model(name), torch.float32)
    model.compile_blocks()
    blocks = model.model.transformer.h if name == "gpt2" else model.model.model.layers
    assert all(block._compiled_call_impl is not None for block in blocks)
