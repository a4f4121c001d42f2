"""Runs that begin from a Hugging Face checkpoint (`model.from`).

The checkpoint is the run's *source*. Its config.json decides the architecture, its tokenizer is the run's unless another is set.
Both are copied into the run's folder when training starts, so that octavo's own checkpoints are enough to resume and to export.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from octavo.convert import convert
from octavo.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from octavo.hf.causal_lm import CausalLM
from octavo.hf.checkpoint import Checkpoint
from octavo.hf.config import decoder_config
from octavo.hf.gguf import cached_conversion
from octavo.hf.load import load_transformers
from octavo.hf.tokenizer_files import copy_tokenizer, same_tokenizer, write_tokenizer
from octavo.models import TransformerConfig
from octavo.train.config import ModelConfig, TrainConfig

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SOURCE = "source"
"""Folder in a run with what an export or a resumed run needs of the checkpoint and the tokenizer that it began with."""
MAX_PADDING = 1024
"""Rows by which an embedding may exceed its vocabulary, which many checkpoints round up."""


def choose_tokenizer(wanted: str | None, source: Checkpoint | None) -> str | Path:
    """The tokenizer that is `wanted`, else that of the checkpoint, else bytes. Raises `ValueError` if the checkpoint has none."""
    if wanted is not None:
        return wanted
    if source is None:
        return ByteTokenizer.name
    if source.tokenizer is None:
        raise ValueError(
            f"{source.path} has no tokenizer.json: set data.tokenizer to the one that the checkpoint was trained with"
        )
    return source.tokenizer


def open_source(config: TrainConfig, folder: Path, resumed: bool) -> Checkpoint | None:
    """What `model.from` names, or the copy of its config and tokenizer in the run's `folder` if the run is resumed.

    None if the model is new. A GGUF file is converted, into `data.cache`. Raises `ValueError` if there is no checkpoint.
    """
    if config.model.from_ is None:
        return None
    if resumed:
        return Checkpoint.open(folder / SOURCE)
    path = Path(config.model.from_).expanduser()
    return Checkpoint.open(cached_conversion(path, Path(config.data.cache)) if path.suffix == ".gguf" else path)


def save_source(folder: Path, source: Checkpoint | None, tokenizer: str | Path) -> None:
    """Copies into `folder` what an export or a resumed run needs besides the weights: config, generation settings, tokenizer.

    The checkpoint's tokenizer stays as it is, with its special tokens and chat template, if the run's is the same, as that of a prepared
    corpus is. A resumed run reads from `folder` itself, which then stays; else it may hold what a run left that never saved a checkpoint.
    """
    if folder in (source.path if source is not None else None, Path(tokenizer).parent):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if source is None and tokenizer == ByteTokenizer.name:
        return
    folder.mkdir()
    if source is None:
        copy_tokenizer(tokenizer, folder)
        return
    source.copy_settings(folder)
    own = source.tokenizer
    write_tokenizer(own if own is not None and same_tokenizer(own, tokenizer) else tokenizer, folder)


def source_config(config: TrainConfig, source: Checkpoint) -> TransformerConfig:
    """The decoder that computes what the checkpoint does. Raises `ValueError` for settings that contradict it."""
    model = config.model
    shape = decoder_config(
        source.config,
        source.path,
        DTYPES[model.dtype],
        recompute=model.recompute,
        recompute_layers=model.recompute_layers,
        fused=model.fused,
    )
    there = {"n_kv_heads": shape.kv_heads, "ffn_dim": shape.ffn_width}
    for name in model.DECIDED_BY_FROM:
        wanted, value = getattr(model, name), there.get(name, getattr(shape, name))
        if wanted is not None and wanted != value:
            raise ValueError(f"model.{name} is {wanted}, and {source.path} has {value}: leave it out (none)")
    if config.data.seq_len > shape.max_seq_len:
        raise ValueError(
            f"data.seq_len is {config.data.seq_len}, and {source.path} takes {shape.max_seq_len} tokens "
            "(max_position_embeddings, or sliding_window if that is less): lower data.seq_len"
        )
    return shape


def check_vocabulary(source: Checkpoint, path: str | Path, tokenizer: Tokenizer) -> None:
    """Raises `ValueError` if the `tokenizer` from `path` is not of the vocabulary of the checkpoint."""
    vocab_size = tokenizer.vocab_size
    rows = source.config.get("vocab_size", vocab_size)
    if path != source.tokenizer and source.tokenizer is not None:
        own = load_tokenizer(source.tokenizer)
        if own.vocabulary() != tokenizer.vocabulary():
            raise ValueError(
                f"data.tokenizer={path} has {vocab_size:,} tokens, and the tokenizer of {source.path} has {own.vocab_size:,}"
                f"{' others' if own.vocab_size == vocab_size else ''}: leave data.tokenizer out to use the checkpoint's own"
            )
    if not vocab_size <= rows < vocab_size + MAX_PADDING:
        raise ValueError(
            f"the tokenizer {path} has {vocab_size:,} tokens, and the embedding of {source.path} {rows:,} rows: "
            "they are of different vocabularies; set data.tokenizer to the one that the checkpoint was trained with"
        )


_OURS = ("recompute", "recompute_layers", "fused")
"""Settings of octavo's own decoder."""


def build_transformers(config: TrainConfig, device: torch.device, source: Checkpoint, weights: bool) -> CausalLM:
    """The converted model of transformers on `device`. Raises `ValueError` for settings that it cannot follow."""
    given = [name for name in config.model.DECIDED_BY_FROM if getattr(config.model, name) is not None]
    given += [name for name in _OURS if getattr(config.model, name) != getattr(ModelConfig, name)]
    if given:
        raise ValueError(
            f"model.{given[0]} is {getattr(config.model, given[0])}, and with model.as=transformers {source.path} decides it: "
            "leave it out"
        )
    model = load_transformers(source, dtype=DTYPES[config.model.dtype], weights=weights)
    longest = model.max_seq_len
    if longest is not None and config.data.seq_len > longest:
        raise ValueError(
            f"data.seq_len is {config.data.seq_len}, and {source.path} takes {longest} tokens: lower data.seq_len"
        )
    model.to(device).train()
    convert(model, config.recipe)
    return model
