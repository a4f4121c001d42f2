"""Families of Hugging Face checkpoints: which of their tensors make up which parameter of our decoder.

Our decoder holds queries, keys and values in one matrix and gate and up in another, so that each input is cast to FP8 once;
checkpoints hold them apart. A parameter is therefore a stack of *pieces*, each one tensor of the checkpoint:

    blocks.3.attention.qkv.weight [(H + 2G)·D, C]  =  rows of q_proj, k_proj, v_proj of model.layers.3.self_attn

GPT-2 holds linear weights as [in, out]; such pieces are transposed. Rotary channels are paired (i, i + D/2) on both sides, so no
row is permuted. Rows of the embedding and of the head beyond the vocabulary are padding: zero here, absent there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.models import TransformerConfig


@dataclass(frozen=True)
class Family:
    """How a `model_type` names its tensors."""

    architecture: str
    """Class of transformers, as config.json names it."""
    body: str
    """Prefix of all tensors but the head's; a checkpoint of the bare model lacks it."""
    blocks: str
    modules: Mapping[str, tuple[str, ...]]
    """Our modules outside of the blocks → theirs, below `body`."""
    block_modules: Mapping[str, tuple[str, ...]]
    """Our modules in a block → theirs, stacked in this order."""
    input_first: bool = False
    """Whether linear weights are stored [in, out]."""
    derived: tuple[str, ...] = field(default=())
    """Ends of the names of tensors that old checkpoints hold although they follow from the config."""


_LLAMA_MODULES = {"embedding": ("embed_tokens",), "norm": ("norm",)}
_LLAMA_ATTENTION = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
}
_LLAMA_BLOCK = {**_LLAMA_ATTENTION, "ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "ffn.out": ("mlp.down_proj",)}


def _llama(architecture: str) -> Family:
    return Family(architecture, "model.", "layers", _LLAMA_MODULES, _LLAMA_BLOCK, derived=("rotary_emb.inv_freq",))


FAMILIES: dict[str, Family] = {
    "llama": _llama("LlamaForCausalLM"),
    "mistral": _llama("MistralForCausalLM"),
    "qwen2": _llama("Qwen2ForCausalLM"),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "transformer.",
        "h",
        {"embedding": ("wte",), "positions": ("wpe",), "norm": ("ln_f",)},
        {
            "attention_norm": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.out": ("attn.c_proj",),
            "ffn_norm": ("ln_2",),
            "ffn.up": ("mlp.c_fc",),
            "ffn.out": ("mlp.c_proj",),
        },
        input_first=True,
        derived=("attn.bias", "attn.masked_bias"),
    ),
    # LayerNorm, rotary positions, GELU, grouped queries, biases everywhere or nowhere: the GPT dialect, exactly.
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        "model.",
        "layers",
        _LLAMA_MODULES,
        {**_LLAMA_ATTENTION, "ffn.up": ("mlp.c_fc",), "ffn.out": ("mlp.c_proj",)},
    ),
}
"""Families that the decoder can express, by `model_type`."""


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint: rows `start` to `stop` of a parameter of ours."""

    name: str
    start: int
    stop: int
    transposed: bool
    """Whether the checkpoint holds these rows as columns."""

    def shape(self, columns: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint, `columns` being the shape of one row of the parameter."""
        rows = self.stop - self.start
        return (*columns, rows) if self.transposed else (rows, *columns)


def pieces(family: Family, config: TransformerConfig, parameter: str, body: str | None = None) -> list[Piece]:
    """The tensors that make up a parameter of the decoder, by its full name, in the order of its rows.

    `body` replaces the family's prefix, for a checkpoint that lacks it.
    """
    module, _, kind = parameter.rpartition(".")
    prefix = family.body if body is None else body
    if module == "lm_head":
        return [Piece(parameter, 0, config.vocab_size, False)]
    if not module.startswith("blocks."):
        rows = {"embedding": config.vocab_size, "positions": config.max_seq_len, "norm": config.dim}[module]
        return [Piece(f"{prefix}{family.modules[module][0]}.{kind}", 0, rows, False)]
    _, number, inner = module.split(".", 2)
    names = family.block_modules[inner]
    transposed = family.input_first and kind == "weight" and not inner.endswith("norm")
    found, start = [], 0
    for name, rows in zip(names, _rows(config, inner, len(names)), strict=True):
        found.append(Piece(f"{prefix}{family.blocks}.{number}.{name}.{kind}", start, start + rows, transposed))
        start += rows
    return found


def _rows(config: TransformerConfig, inner: str, parts: int) -> list[int]:
    """Rows of each piece of a module in a block."""
    if inner == "attention.qkv":
        heads = [config.n_heads, config.kv_heads, config.kv_heads]
        rows = [count * config.head_dim for count in heads]
        return rows if parts == 3 else [sum(rows)]
    return {"ffn.gate_up": [config.ffn_width] * parts, "ffn.up": [config.ffn_width]}.get(inner, [config.dim])


def family_of(config: Mapping[str, Any], where: object) -> Family:
    """The family of a config.json. Raises `ValueError` if the decoder has none for it."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"{where} has model_type {kind!r}, and the decoder can be {', '.join(FAMILIES)}: train the transformers model itself "
            "(model.as=transformers)"
        )
    return FAMILIES[kind]
