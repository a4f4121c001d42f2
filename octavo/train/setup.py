"""From a config to the parts of a run: folder, device, model, optimizer, random state. (Its data is `octavo.train.data`.)"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.convert import BreakEven, initialize
from octavo.convert.break_even import Rule, deciding_by
from octavo.convert.policy import sides
from octavo.hf.causal_lm import CausalLM
from octavo.hf.checkpoint import Checkpoint
from octavo.hf.load import DecoderValues
from octavo.models import Transformer, TransformerConfig
from octavo.optim import AdamW, GradientRelease, release_gradients
from octavo.train.config import TrainConfig
from octavo.train.schedule import decay_groups
from octavo.train.source import DTYPES, build_transformers, source_config


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


def model_config(config: TrainConfig, vocab_size: int, source: Checkpoint | None = None) -> TransformerConfig:
    """The architecture of a run; raises `ValueError` for sizes that do not fit together, or not to the checkpoint `source`."""
    model = config.model
    if source is not None:
        return source_config(config, source)
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise ValueError(f"model.vocab_size is {model.vocab_size}: the tokenizer has {vocab_size} tokens")
    values = {name: getattr(model, name) for name in model.DECIDED_BY_FROM}
    return TransformerConfig(
        **{**values, "vocab_size": model.vocab_size or vocab_size},
        max_seq_len=config.data.seq_len,
        dtype=DTYPES[model.dtype],
        recompute=model.recompute,
        recompute_layers=model.recompute_layers,
        fused=model.fused,
    )


def build_model(
    config: TrainConfig,
    vocab_size: int,
    device: torch.device,
    source: Checkpoint | None = None,
    resumed: bool = False,
    break_even: Rule | None = None,
) -> Transformer | CausalLM:
    """The converted model on `device`: its weights a function of the seed alone, or those of the checkpoint `source`.

    Those of a `resumed` run that began from a checkpoint are not set: octavo's own checkpoint has them. `break_even` leaves layers
    for their speed, those of fused blocks together.
    """
    if source is not None and config.model.as_ == "transformers":
        with deciding_by(break_even):
            return build_transformers(config, device, source, weights=not resumed)
    shape = model_config(config, vocab_size, source)
    fill = None
    if source is not None:
        fill = _zero if resumed else DecoderValues(source, shape)
    if shape.fused and config.recipe.fuses(config.train.compile) and isinstance(break_even, BreakEven):
        break_even = replace(break_even, together=_block_shapes(shape))
    with deciding_by(break_even):
        return Transformer.build(shape, recipe=config.recipe, device=device, seed=config.seed, fill=fill)


def _block_shapes(shape: TransformerConfig) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the linear layers of a block."""
    with torch.device("meta"):
        (block,) = Transformer(replace(shape, n_layers=1)).blocks
    return tuple(sides(module) for module in block.modules() if isinstance(module, nn.Linear))


def _zero(name: str, parameter: Tensor) -> None:
    """For a parameter that is loaded later: uninitialised memory could hold a NaN, which a conversion would notice."""
    parameter.zero_()


def build_optimizer(config: TrainConfig, model: nn.Module) -> AdamW:
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


def build_release(config: TrainConfig, model: nn.Module, optimizer: AdamW, world: int) -> GradientRelease | None:
    """Gradient release, if the config wants it. Raises `ValueError` for more than one rank, or micro-batch a step."""
    rule, count = config.optim.release, config.train.micro_batches
    if rule == "none":
        return None
    if world > 1:
        raise ValueError(
            f"optim.release={rule} frees gradients before {world} ranks could average them: set it to none"
        )
    if count > 1:
        raise ValueError(
            f"optim.release={rule} updates the weights in each backward, so gradients cannot add up over train.micro_batches={count}: "
            f"set it to 1 (and data.micro_batch to {count * config.data.micro_batch}, if that fits), or optim.release=none"
        )
    return release_gradients(model, optimizer, config.optim.clip, rule)


def random_states(device: torch.device, rank: int = 0) -> dict[str, Tensor]:
    """States of PyTorch's generators, by name; each rank has its own."""
    owner = f"random/{rank}/" if rank else "random/"
    states = {f"{owner}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{owner}cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_states` returned."""
    for name, state in states.items():
        if name.endswith("cuda"):
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


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
