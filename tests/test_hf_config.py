"""config.json ↔ decoder: sizes are read in the spelling of any version, features that the decoder lacks are refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import CONFIGS, GPT2, LLAMA3

from octavo.hf.config import decoder_config, hf_config, same_architecture, warn_of_dropout
from octavo.hf.families import FAMILIES
from octavo.models import SIZES, TransformerConfig
from octavo.models.config import RopeScaling


def settings(name: str, **changes: Any) -> dict[str, Any]:
    kind, values = CONFIGS[name]
    return {**values, "model_type": kind, **changes}


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """What config.json leaves out means the same here and there."""
    from transformers import AutoConfig

    kind, values = CONFIGS[name]
    full = json.loads(AutoConfig.for_model(kind, **values).to_json_string(use_diff=False))
    assert decoder_config(settings(name), "x") == decoder_config(full, "x")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "mistral"])
def test_round_trip_through_a_published_family(name: str) -> None:
    config = decoder_config(settings(name), "x")
    values = hf_config(config, eot=3)
    assert values["architectures"] == [FAMILIES[settings(name)["model_type"]].architecture]
    assert same_architecture(decoder_config(values, "x"), config) and values["eos_token_id"] == 3


@pytest.mark.parametrize("name", SIZES)
def test_every_size_has_a_family(name: str) -> None:
    kind = hf_config(SIZES[name], None)["model_type"]
    assert kind == ("llama" if SIZES[name].dialect == "llama" else "starcoder2")


def test_what_no_family_computes_is_refused() -> None:
    for changes in ({"qkv_bias": True}, {"positions": "learned"}):
        with pytest.raises(ValueError, match="cannot be exported"):
            hf_config(dataclasses.replace(SIZES["tiny"], **changes), None)


def test_rotary_positions_in_the_spelling_of_every_version() -> None:
    plain = decoder_config(settings("llama", rope_theta=5e5), "x")
    assert plain.rope_theta == 5e5 and plain.rope_scaling is None
    old = {key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")}
    for word in ("type", "rope_type"):
        stretched = decoder_config(settings("llama", rope_theta=5e4, rope_scaling={**old, word: "llama3"}), "x")
        assert stretched == decoder_config(settings("llama-stretched"), "x")
    assert stretched.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


def test_a_window_of_attention_is_the_longest_sequence() -> None:
    assert decoder_config(settings("mistral", sliding_window=17), "x").max_seq_len == 17
    assert decoder_config(settings("mistral", sliding_window=None), "x").max_seq_len == 64
    for kind, longest in {"mistral": 4096, "qwen2": 8192, "llama": 8192}.items():  # as in transformers
        silent = settings(kind, max_position_embeddings=8192)
        silent = {name: value for name, value in silent.items() if "sliding" not in name}
        assert decoder_config(silent, "x").max_seq_len == longest
    assert decoder_config(settings("qwen2", sliding_window=17, use_sliding_window=False), "x").max_seq_len == 64
    assert decoder_config(settings("qwen2", sliding_window=17, use_sliding_window=True), "x").max_seq_len == 17


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (settings("llama", model_type="qwen3"), ["qwen3", "llama, mistral", "model.as=transformers"]),
        (settings("llama", model_type=None), ["None"]),
        (settings("llama", hidden_act="gelu"), ["hidden_act='gelu'", "silu", "model.as=transformers"]),
        (settings("llama", rope_parameters={"rope_type": "yarn", "factor": 4.0}), ["yarn", "model.as=transformers"]),
        (settings("llama", rope_scaling={"type": "dynamic", "factor": 4.0}), ["dynamic"]),
        (settings("llama", partial_rotary_factor=0.5), ["partial_rotary_factor"]),
        ({"model_type": "gpt2", **GPT2, "activation_function": "relu"}, ["activation_function='relu'", "gelu_new"]),
        ({"model_type": "gpt2", **GPT2, "scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ({"model_type": "gpt2", **GPT2, "scale_attn_weights": False}, ["scale_attn_weights"]),
        ({"model_type": "gpt2", **GPT2, "add_cross_attention": True}, ["add_cross_attention"]),
        ({"model_type": "llama", "hidden_size": 64}, ["num_attention_heads", "FOLDER/config.json"]),
        (settings("llama", hidden_size="64"), ["FOLDER/config.json"]),
        (settings("llama", num_attention_heads=5), ["n_heads=5"]),
    ],
)
def test_features_are_refused_by_name(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        decoder_config(values, "FOLDER")
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


def test_dropout_is_left_out_with_a_warning() -> None:
    warn_of_dropout(settings("gpt2"), "FOLDER")
    with pytest.warns(UserWarning, match=r"FOLDER.*attn_pdrop.*model.as=transformers"):
        warn_of_dropout(settings("gpt2", attn_pdrop=0.1), "FOLDER")


@pytest.mark.parametrize(
    "arguments",
    [("yarn", 2.0), ("linear", 0.5), ("linear", float("nan")), ("llama3", 2.0, 4.0, 4.0), ("llama3", 2.0, 0.0)],
)
def test_impossible_stretching_is_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="rotary scaling"):
        RopeScaling(*arguments)


def test_architecture_is_what_computes() -> None:
    config = TransformerConfig("llama", 64, 2, 4, ffn_dim=96)
    same = dataclasses.replace(config, n_kv_heads=4, head_size=16, dtype=torch.float32, recompute="full", max_seq_len=9)
    assert same_architecture(config, same)
    for changes in ({"rope_theta": 1.0}, {"n_kv_heads": 2}, {"norm_eps": 1e-6}, {"qkv_bias": True}):
        assert not same_architecture(config, dataclasses.replace(config, **changes))
