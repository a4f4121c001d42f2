"""Packed documents: each one's logits are those that it has alone, whatever stands beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.models import SIZES, Transformer, TransformerConfig
from octavo.models.layers import document_places

KINDS = {
    "gpt": ("tiny", {}),
    "llama": ("tiny-llama", {}),
    "learned positions": ("tiny", {"positions": "learned"}),
}


def small(kind: str, **changes) -> TransformerConfig:
    name, own = KINDS[kind]
    return dataclasses.replace(SIZES[name], max_seq_len=64, **{"dtype": torch.float32, **own, **changes})


def packed(
    config: TransformerConfig, length: int = 48
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, int]]]:
    """Two sequences of documents cut at random places: tokens, numbers of documents, and (row, begin, end) of each document."""
    tokens = torch.randint(config.vocab_size, (2, length))
    documents = torch.zeros(2, length, dtype=torch.int32)
    parts = []
    for row in range(2):
        cuts = [0, *sorted((torch.randperm(length - 1)[:4] + 1).tolist()), length]
        for number, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            documents[row, begin:end] = number + 5 * row
            parts.append((row, begin, end))
    return tokens, documents, parts


def build(config: TransformerConfig, seed: int, recipe: str | None = None) -> Transformer:
    """A model in which it matters what a token sees: sharper attention over larger values than at initialisation."""
    model = Transformer.build(config, recipe=recipe, seed=seed)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(10)
            block.attention.out.weight.mul_(10)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_packed_documents_equal_those_of_each_alone(kind, seed):
    config = small(kind)
    model = build(config, seed)
    tokens, documents, parts = packed(config)
    together = model(tokens, documents=documents)
    assert (together - model(tokens)).abs().max() > 0.01
    for row, begin, end in parts:
        alone = model(tokens[row : row + 1, begin:end])[0]
        torch.testing.assert_close(together[row, begin:end], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_document_is_a_plain_sequence(kind, seed):
    model = build(small(kind), seed)
    tokens, documents, _ = packed(model.config)
    plain = model(tokens, documents=torch.full_like(documents, 3))
    torch.testing.assert_close(plain, model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_gradients_are_the_sum_over_documents(kind, recompute, seed):
    """In FP64, so that the order of the sums does not matter."""
    config = small(kind, recompute=recompute, dtype=torch.float64)
    model = build(config, seed).double()
    tokens, documents, parts = packed(config)
    weights = torch.randn(*tokens.shape, config.vocab_size, dtype=torch.float64)
    parameters = tuple(model.parameters())
    together = torch.autograd.grad((model(tokens, documents=documents) * weights).sum(), parameters)
    alone = sum((model(tokens[r : r + 1, b:e])[0] * weights[r, b:e]).sum() for r, b, e in parts)
    for one, other in zip(together, torch.autograd.grad(alone, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recipe", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_documents_stay_apart_in_fp8(kind, recipe, seed):
    """Scales belong to the whole batch, so codes differ in the last bit: near the logits of each alone, far from joined ones."""
    config = small(kind)
    model = build(config, seed, recipe)
    with torch.no_grad():
        tokens, documents, parts = packed(config)
        together, joined = model(tokens, documents=documents), model(tokens)
        alone = torch.empty_like(together)
        for row, begin, end in parts:
            alone[row, begin:end] = model(tokens[row : row + 1, begin:end])[0]
    error, difference = (together - alone).norm() / alone.norm(), (joined - alone).norm() / alone.norm()
    assert error < 0.05 and error < difference / 2


def test_no_gradient_reaches_another_document_in_fp8(seed):
    config = small("llama", tie_embeddings=False)
    model = build(config, seed, "O2")
    tokens, documents, parts = packed(config)
    row, begin, end = parts[-1]
    targets = torch.full_like(tokens, -100)
    targets[row, begin:end] = torch.randint(config.vocab_size, (end - begin,))
    model(tokens, targets, documents).backward()
    own = torch.zeros(config.padded_vocab_size, dtype=torch.bool)
    own[tokens[row, begin:end]] = True
    moved = (model.embedding.weight.grad != 0).any(dim=1)
    assert torch.equal(moved, own)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_compiled_blocks_give_the_same(kind, seed):
    config = small(kind)
    model = build(config, seed)
    tokens, documents, _ = packed(config)
    targets = torch.randint(config.vocab_size, tokens.shape)
    expected, joined = model(tokens, targets, documents), model(tokens, targets)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(tokens, targets, documents), expected)
    torch.testing.assert_close(model(tokens, targets), joined)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, "O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_stay_apart_on_a_gpu(kind, recipe, seed):
    """Also the gradients: the kernels that take a mask and those of plain sequences agree in BF16."""
    config = small(kind, dtype=torch.bfloat16, n_layers=1)
    model = build(config, seed, recipe).cuda()
    tokens, documents, parts = packed(config)
    tokens, documents = tokens.cuda(), documents.cuda()
    together = model(tokens, documents=documents)
    alone = torch.cat([model(tokens[row : row + 1, begin:end])[0] for row, begin, end in parts]).view_as(together)
    assert (together - alone).norm() < 0.05 * alone.norm()
    weights = torch.randn_like(together)
    gradients = [
        torch.autograd.grad((logits * weights).sum(), model.embedding.weight)[0].float() for logits in (together, alone)
    ]
    assert (gradients[0] - gradients[1]).norm() < 0.1 * gradients[1].norm()


def test_places_and_mask(seed):
    documents = torch.tensor([[4, 4, 7, 4, 4, 4], [0, 0, 0, 0, 0, 0]])
    places, mask = document_places(documents)
    assert places.tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert mask.shape == (2, 1, 6, 6)
    assert torch.equal(mask[1, 0], torch.ones(6, 6).tril().bool())
    expected = torch.block_diag(torch.ones(2, 2).tril(), torch.ones(1, 1), torch.ones(3, 3).tril()).bool()
    assert torch.equal(mask[0, 0], expected)


def test_numbers_must_fit_the_tokens(seed):
    model = Transformer.build(small("gpt"), seed=seed)
    with pytest.raises(ValueError, match=r"documents \[2, 7\] must have a number for each of tokens \[2, 8\]"):
        model(torch.zeros(2, 8, dtype=torch.int64), documents=torch.zeros(2, 7, dtype=torch.int64))
