"""config.json of a checkpoint ↔ `TransformerConfig`, read as plain JSON so that nothing of transformers is imported.

What a family can do and our decoder cannot is refused by its name, before a weight is read; dropout is left out with a warning,
since it changes no logits. A window of attention costs nothing while sequences fit into it, so it becomes the longest sequence.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from octavo.hf.families import family_of
from octavo.models import TransformerConfig
from octavo.models.config import RopeScaling

_GELU = ("gelu_new", "gelu_pytorch_tanh")
_DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
OTHER_WAY = "train the transformers model itself (model.as=transformers)"


def decoder_config(
    config: Mapping[str, Any], where: object, dtype: torch.dtype = torch.float32, **others: Any
) -> TransformerConfig:
    """The decoder that computes what a checkpoint with this config.json does.

    `where` names the checkpoint in errors, `others` are further fields of `TransformerConfig`. Raises `ValueError`, naming the
    feature, for what the decoder cannot express.
    """
    family_of(config, where)
    kind = config["model_type"]
    read = _gpt2 if kind == "gpt2" else _gpt_dialect if kind == "starcoder2" else _llama_dialect
    try:
        return TransformerConfig(**read(config, where), dtype=dtype, **others)
    except KeyError as error:
        raise ValueError(f"{where}/config.json has no {error}, which a {kind} model needs") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where}/config.json has a value of the wrong kind: {error}") from None


def warn_of_dropout(config: Mapping[str, Any], where: object) -> None:
    """Warns if the config asks for dropout, which the decoder does not have."""
    active = [name for name in _DROPOUTS if config.get(name)]
    if active:
        warnings.warn(
            f"{where} asks for dropout ({', '.join(active)}), which the decoder does not have: it trains without it; "
            "model.as=transformers applies it",
            stacklevel=3,
        )


def _llama_dialect(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    _require(config, where, "hidden_act", ("silu",), "silu")
    kind = config["model_type"]
    attention_bias = bool(config.get("attention_bias", False)) if kind == "llama" else False
    return {
        "dialect": "llama",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "qkv_bias": kind == "qwen2" or attention_bias,
        "out_bias": attention_bias,
        "ffn_bias": bool(config.get("mlp_bias", False)) if kind == "llama" else False,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        **_rotary_sizes(config, where),
    }


def _gpt_dialect(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    _require(config, where, "hidden_act", _GELU, _GELU[1])
    bias = bool(config.get("use_bias", True))
    return {
        "dialect": "gpt",
        "norm_eps": config.get("norm_epsilon", 1e-5),
        "qkv_bias": bias,
        "out_bias": bias,
        "ffn_bias": bias,
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        **_rotary_sizes(config, where),
    }


def _gpt2(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    _require(config, where, "activation_function", _GELU, _GELU[0])
    _require(config, where, "scale_attn_weights", (True,), True)
    _require(config, where, "scale_attn_by_inverse_layer_idx", (False,), False)
    _require(config, where, "add_cross_attention", (False,), False)
    return {
        "dialect": "gpt",
        "dim": config["n_embd"],
        "n_layers": config["n_layer"],
        "n_heads": config["n_head"],
        "ffn_dim": config.get("n_inner") or 4 * config["n_embd"],
        "vocab_size": config["vocab_size"],
        "max_seq_len": config["n_positions"],
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _rotary_sizes(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """What all families with rotary positions name alike."""
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    longest = config["max_position_embeddings"]
    kind = config["model_type"]
    # What transformers takes where config.json is silent.
    window = config.get("sliding_window", 4096 if kind in ("mistral", "qwen2") else None)
    if window is not None and config.get("use_sliding_window", kind != "qwen2"):
        longest = min(longest, window)
    theta, scaling = _rope(config, where)
    head_size = config.get("head_dim")
    return {
        "dim": dim,
        "n_layers": config["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "head_size": None if head_size is None or head_size * heads == dim else head_size,
        "ffn_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_seq_len": longest,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _rope(config: Mapping[str, Any], where: object) -> tuple[float, RopeScaling | None]:
    """(base, scaling), from the form of transformers 5 (`rope_parameters`) or of those before (`rope_theta`, `rope_scaling`)."""
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), **(config.get("rope_scaling") or {})}
    rope.update(config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(
            f"{where} rotates a part of each head (partial_rotary_factor), the decoder all of it: {OTHER_WAY}"
        )
    if kind == "default":
        return rope["rope_theta"], None
    if kind == "linear":
        return rope["rope_theta"], RopeScaling("linear", rope["factor"])
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
        return rope["rope_theta"], scaling
    raise ValueError(
        f"{where} has rotary positions of type {kind!r}, the decoder default, linear and llama3: {OTHER_WAY}"
    )


def _require(config: Mapping[str, Any], where: object, name: str, known: tuple[Any, ...], default: Any) -> None:
    value = config.get(name, default)
    if value not in known:
        raise ValueError(
            f"{where} has {name}={value!r}, and the decoder has {' or '.join(map(repr, known))}: {OTHER_WAY}"
        )


_FREE = ("dtype", "recompute", "recompute_layers", "fused", "max_seq_len")
"""Fields of `TransformerConfig` that are no part of the architecture."""


def same_architecture(one: TransformerConfig, other: TransformerConfig) -> bool:
    """Whether both have the same parameters and compute the same function."""

    def parts(config: TransformerConfig) -> dict[str, Any]:
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _FREE}
        return values | {"n_kv_heads": config.kv_heads, "ffn_dim": config.ffn_width, "head_size": config.head_dim}

    return parts(one) == parts(other)


def hf_config(config: TransformerConfig, eot: int | None) -> dict[str, Any]:
    """config.json for a decoder, of the published family that computes the same.

    GPT-2 for learned positions, Starcoder2 for the GPT dialect with rotary ones, Qwen2 for the LLaMA dialect with biases of
    queries, keys and values alone, else LLaMA. Raises `ValueError` if none fits.
    """
    values = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "use_cache": True,
        **(_gpt2_values(config) if config.positions == "learned" else _rotary_values(config)),
    }
    values["architectures"] = [family_of(values, "the model").architecture]
    if not same_architecture(decoder_config(values, "the model"), config):
        raise ValueError(
            "no family of transformers has this combination of dialect, positions and biases: it cannot be exported"
        )
    return values


def _gpt2_values(config: TransformerConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": config.dim,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.ffn_width,
        "n_positions": config.max_seq_len,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _rotary_values(config: TransformerConfig) -> dict[str, Any]:
    values = {
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": config.max_seq_len,
        "rope_parameters": _rope_parameters(config),
        "attention_dropout": 0.0,
    }
    if config.dialect == "gpt":
        return values | {
            "model_type": "starcoder2",
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": config.norm_eps,
            "use_bias": config.qkv_bias,
            "sliding_window": None,
            "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
        }
    values |= {"hidden_act": "silu", "rms_norm_eps": config.norm_eps}
    if config.qkv_bias and not config.out_bias:
        return values | {"model_type": "qwen2", "use_sliding_window": False}
    return values | {"model_type": "llama", "attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias}


def _rope_parameters(config: TransformerConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    parameters = {"rope_type": scaling.kind, "rope_theta": config.rope_theta, "factor": scaling.factor}
    if scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original,
        }
    return parameters
