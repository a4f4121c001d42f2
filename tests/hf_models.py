"""Small random models of transformers, one of each family, saved as checkpoints. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TQDM_DISABLE", "1")

VOCAB = 301
"""No multiple of 64: the decoder pads it."""
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "llama-tied": ("llama", {**_SIZES, "tie_word_embeddings": True}),
    "llama-biased": ("llama", {**_SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-stretched": ("llama", {**_SIZES, "rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {**_SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {**_SIZES, "head_dim": 32, "sliding_window": 64}),
    "qwen2": ("qwen2", _SIZES),
    "qwen2-tied": ("qwen2", {**_SIZES, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", GPT2),
    "starcoder2": ("starcoder2", {**_SIZES, "use_bias": False, "tie_word_embeddings": False}),
    "starcoder2-biased": ("starcoder2", {**_SIZES, "use_bias": True, "tie_word_embeddings": True}),
}
"""Name → (model_type, settings)."""


def random_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of transformers with random weights, gains and biases, large enough that logits are of order one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**settings, **changes}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            gain = 1.0 if parameter.ndim == 1 and key.endswith("weight") else 0.0
            parameter.copy_(gain + (0.15 if parameter.ndim > 1 else 0.3) * torch.randn_like(parameter))
    return model.to(dtype).eval()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, shards: str = "5GB", **changes: Any) -> Any:
    """A random model, saved as a checkpoint in `folder`; returns it."""
    model = random_model(name, dtype, **changes)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Rewrites config.json; a value of None removes the key."""
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Rewrites model.safetensors with tensors replaced or added; None removes one. Dots in names are written as `__`."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {**load_file(folder / "model.safetensors")}
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file(
        {k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, from all its files."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name in one
    )
