"""Runs as functions: each returns a complete `TrainConfig`, and a variant is three lines.

    def my_run() -> TrainConfig:
        config = gpt_125m()
        return replace(config, name="mine", optim=replace(config.optim, lr=3e-4))

The GPT sizes are Table 1 of FP8-LM (arXiv 2310.18313): sequence 2,048, AdamW (0.9, 0.95), weight decay 0.1, clip 1.0, 1,000
steps of warm-up, cosine decay to 10%. Steps are the paper's tokens over its batch; `micro_batches` makes its batch out of
micro-batches on one GPU. No preset names a learning rate per recipe: FP8 and BF16 runs share all hyper-parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from octavo.train.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)


def demo() -> TrainConfig:
    """A small byte-level GPT on the text of this machine: minutes on two CPU cores, seconds on a GPU. In FP8 although it is small."""
    return TrainConfig(
        name="demo",
        out="runs/demo",
        model=ModelConfig(dim=256, n_layers=3, n_heads=4, break_even=None),
        data=DataConfig(seq_len=256, micro_batch=4, val_fraction=0.05, max_bytes=16_000_000),
        optim=OptimConfig(lr=1e-3, warmup_steps=40),
        train=LoopConfig(steps=320, eval_every=None, eval_batches=20),
        checkpoint=CheckpointConfig(every=None, keep=1),
        log=LogConfig(every=10, stats_every=80),
    )


def tiny() -> TrainConfig:
    """Seconds on a CPU: two blocks of 64 channels; for tests and for trying out settings."""
    config = demo()
    return replace(
        config,
        name="tiny",
        out="runs/tiny",
        model=replace(config.model, dim=64, n_layers=2, n_heads=2),
        data=replace(config.data, seq_len=64, micro_batch=2, max_bytes=2_000_000),
        train=replace(config.train, steps=100, eval_batches=4),
    )


def gpt_125m() -> TrainConfig:
    """GPT 125M: 100B tokens in batches of 1M."""
    return _gpt("gpt_125m", dim=768, heads=12, layers=12, lr=6e-4, micro_batch=32, batch_tokens=2**20, tokens=100e9)


def gpt_7b() -> TrainConfig:
    """GPT 7B: 100B tokens in batches of 4M."""
    return _gpt("gpt_7b", dim=4096, heads=32, layers=32, lr=3e-4, micro_batch=4, batch_tokens=2**22, tokens=100e9)


def gpt_13b() -> TrainConfig:
    """GPT 13B: 100B tokens in batches of 4M."""
    return _gpt("gpt_13b", dim=5120, heads=40, layers=40, lr=3e-4, micro_batch=2, batch_tokens=2**22, tokens=100e9)


def gpt_175b() -> TrainConfig:
    """GPT 175B: 40B tokens in batches of 1M."""
    return _gpt("gpt_175b", dim=12288, heads=96, layers=96, lr=3e-5, micro_batch=1, batch_tokens=2**20, tokens=40e9)


def llama_125m() -> TrainConfig:
    """The 125M run with LLaMA blocks (RMSNorm, SwiGLU)."""
    return _llama(gpt_125m(), "llama_125m", ffn_dim=2048)


def llama_7b() -> TrainConfig:
    """The 7B run with LLaMA blocks."""
    return _llama(gpt_7b(), "llama_7b", ffn_dim=11008)


def llama_13b() -> TrainConfig:
    """The 13B run with LLaMA blocks."""
    return _llama(gpt_13b(), "llama_13b", ffn_dim=13824)


def _gpt(
    name: str, *, dim: int, heads: int, layers: int, lr: float, micro_batch: int, batch_tokens: int, tokens: float
) -> TrainConfig:
    seq_len = 2048
    return TrainConfig(
        name=name,
        out=f"runs/{name}",
        model=ModelConfig(dim=dim, n_layers=layers, n_heads=heads, recompute="full" if dim >= 12288 else "none"),
        data=DataConfig(seq_len=seq_len, micro_batch=micro_batch),
        optim=OptimConfig(lr=lr, warmup_steps=1000),
        train=LoopConfig(
            steps=round(tokens / batch_tokens),
            micro_batches=batch_tokens // (seq_len * micro_batch),
            compile=True,
            eval_every=1000,
        ),
        checkpoint=CheckpointConfig(every=1000, keep=2),
    )


def _llama(config: TrainConfig, name: str, ffn_dim: int) -> TrainConfig:
    dialect: Literal["llama"] = "llama"
    return replace(config, name=name, out=f"runs/{name}", model=replace(config.model, dialect=dialect, ffn_dim=ffn_dim))


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    preset.__name__: preset
    for preset in (demo, tiny, gpt_125m, gpt_7b, gpt_13b, gpt_175b, llama_125m, llama_7b, llama_13b)
}
"""Presets by the name that the command line takes."""


def get_preset(name: str) -> TrainConfig:
    """The config of that name; `-` may stand for `_`. Raises `ValueError` with the closest names."""
    preset = PRESETS.get(name.replace("-", "_"))
    if preset is None:
        close = difflib.get_close_matches(name.replace("-", "_"), PRESETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(PRESETS)}"
        raise ValueError(f"no preset is called {name!r}; {hint}")
    return preset()
