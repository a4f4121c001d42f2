"""Small runs for the tests of training: a text that any machine can make, and a model that takes milliseconds a step."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from octavo.settings import override
from octavo.train.checkpoint_folder import latest
from octavo.train.config import TrainConfig
from octavo.train.metrics import read_metrics
from octavo.train.presets import tiny

WORDS = "the a of to in scale tensor step loss code weight gradient eight bits octavo sheet leaf fold press ink page".split()


def write_text(path: Path, documents: int = 400) -> Path:
    """A JSON-lines file of short random documents, always the same."""
    source = random.Random(0)
    lines = [" ".join(source.choices(WORDS, k=source.randint(20, 60))) for _ in range(documents)]
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    return path


def small_config(folder: Path, *assignments: str) -> TrainConfig:
    """One block of 32 channels, two micro-batches of 2 x 16 tokens, without TensorBoard."""
    return override(tiny(), small_settings(folder) + list(assignments))


def small_settings(folder: Path) -> list[str]:
    """The assignments that make the `tiny` preset a `small_config`."""
    text = folder / "text.jsonl"
    if not text.exists():
        write_text(text)
    return [
        f"out={folder}/run",
        f"data.path={text}",
        f"data.cache={folder}/cache",
        "data.val_fraction=0.1",
        "data.seq_len=16",
        "model.dim=32",
        "model.n_layers=1",
        "train.micro_batches=2",
        "train.eval_batches=2",
        "optim.warmup_steps=4",
        "device=cpu",
        "log.tensorboard=false",
        "log.every=5",
    ]


def newest(config: TrainConfig) -> Path:
    """The newest checkpoint of a run; there must be one."""
    found = latest(Path(config.out) / "checkpoints")
    assert found is not None
    return found


EXACT = ("step", "tokens", "loss", "grad_norm", "lr", "skipped", "val_loss")
"""What a record has of the run itself rather than of the machine."""


def exact_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run without what depends on the machine."""
    records = [
        {key: record[key] for key in EXACT if key in record} for record in read_metrics(folder / "metrics.jsonl")
    ]
    return [record for record in records if len(record) > 1]


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as bytes, so that NaN equals itself and no dtype is left out of the comparison."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
    return {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Both checkpoints hold the same tensors, bit for bit."""
    first, second = read_checkpoint(one), read_checkpoint(other)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} tensors differ: {different[:5]}"


def launch(settings: list[str], rank: int, port: int, **environment: str) -> subprocess.Popen:
    """`octavo train tiny` as one of two ranks of this machine, unless the `environment` says otherwise."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "octavo.cli", "train", "tiny", *(part for s in settings for part in ("--set", s))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **place, **environment}, stderr=pipe, stdout=pipe, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
