"""From a config to the parts of a run: device, data, model, optimizer, random state."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.convert import initialize
from octavo.data import TokenStream, load_tokenizer, prepare
from octavo.models import Transformer, TransformerConfig
from octavo.optim import AdamW
from octavo.train.config import DataConfig, TrainConfig
from octavo.train.schedule import decay_groups

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [micro_batch, seq_len] each."""


class Data:
    """The text of a run as batches. Raises `ValueError` when it is missing, binary, empty or shorter than one sequence."""

    def __init__(self, config: DataConfig, seed: int, device: torch.device) -> None:
        tokenizer = load_tokenizer(config.tokenizer)
        self._corpus = prepare(
            config.path, tokenizer, config.cache, validation=config.val_fraction, max_bytes=config.max_bytes
        )
        counts = [shard.count for shard in self._corpus]
        if min(counts) <= config.seq_len:
            raise ValueError(
                f"data.path={config.path} gives {counts[0]:,} tokens of training text and {counts[1]:,} held out, and each side "
                f"needs the {config.seq_len + 1:,} of data.seq_len={config.seq_len}: give more text, a smaller data.seq_len or "
                f"another data.val_fraction (it is {config.val_fraction})"
            )
        self._config, self._device = config, device
        self.vocab_size = tokenizer.vocab_size
        self._train = TokenStream(self._corpus.train, config.seq_len, config.micro_batch, seed=seed)

    @property
    def fingerprint(self) -> str:
        """Of the tokens themselves: equal for equal text, wherever it lies."""
        return f"{self._corpus.train.checksum}-{self._corpus.validation.checksum}"

    def next_batch(self) -> Batch:
        """The next micro-batch of training text, on the device."""
        inputs, targets = next(self._train)
        return self._send(inputs), self._send(targets)

    def validation(self, count: int) -> Iterator[Batch]:
        """`count` micro-batches of held-out text, the same ones at each call; fewer if there is less text."""
        stream = self._held_out()
        for _ in range(min(count, max(1, stream.windows // stream.batch_size))):
            inputs, targets = next(stream)
            yield self._send(inputs), self._send(targets)

    def _send(self, tokens: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return tokens.to(self._device)
        # Only a contiguous tensor in page-locked memory is copied without waiting for the device.
        return tokens.contiguous().pin_memory().to(self._device, non_blocking=True)

    def _held_out(self) -> TokenStream:
        return TokenStream(self._corpus.validation, self._config.seq_len, self._config.micro_batch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the training text."""
        return self._train.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._train.load_state_dict(state)


def run_folder(out: str) -> Path:
    """The folder of a run, there or not. Raises `ValueError` if a file is in its way."""
    folder = Path(out)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"out={out} cannot be the folder of a run: {nearest} is a file; choose another folder")
    return folder


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one, else the CPU. Raises `ValueError` for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name} cannot be used here ({reason}); use auto, cpu or cuda") from None
    return device


def model_config(config: TrainConfig, vocab_size: int) -> TransformerConfig:
    """The architecture of a run; raises `ValueError` for sizes that do not fit together."""
    model = config.model
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise ValueError(f"model.vocab_size is {model.vocab_size}: the tokenizer has {vocab_size} tokens")
    return TransformerConfig(
        dialect=model.dialect,
        dim=model.dim,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        ffn_dim=model.ffn_dim,
        vocab_size=model.vocab_size or vocab_size,
        max_seq_len=config.data.seq_len,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        tie_embeddings=model.tie_embeddings,
        dtype=DTYPES[model.dtype],
        recompute=model.recompute,
    )


def build_model(config: TrainConfig, vocab_size: int, device: torch.device) -> Transformer:
    """The converted model on `device`, its weights a function of the seed alone."""
    return Transformer.build(model_config(config, vocab_size), recipe=config.recipe, device=device, seed=config.seed)


def build_optimizer(config: TrainConfig, model: Transformer) -> AdamW:
    """AdamW over the model's parameters; with delayed scaling its steps move the model's scales on."""
    optim = config.optim
    optimizer = AdamW(
        decay_groups(model, optim.weight_decay),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        recipe=config.recipe,
        seed=config.seed,
    )
    initialize(model, optimizer, config.recipe)
    return optimizer


def random_states(device: torch.device) -> dict[str, Tensor]:
    """States of PyTorch's generators, by name."""
    states = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(states["random/cpu"])
    if "random/cuda" in states:
        torch.cuda.set_rng_state(states["random/cuda"], device)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic kernels inside, if wanted; where PyTorch has none it warns and goes on."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        # cuBLAS reads this when its first handle is made, and PyTorch refuses determinism without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def versions() -> dict[str, str]:
    """What wrote a run."""
    return {
        "octavo": importlib.metadata.version("octavo"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
