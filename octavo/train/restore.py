"""A saved run as a model again, for evaluation and export: `SavedRun.open(path).load_model()`.

The checkpoint's config says what the model is, its tensors what it has learned; what began from a Hugging Face checkpoint also needs
the run's `source` folder, which stands beside `checkpoints`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octavo.convert.break_even import Left
from octavo.data.tokenizers import ByteTokenizer, load_tokenizer
from octavo.hf.causal_lm import CausalLM
from octavo.hf.checkpoint import Checkpoint
from octavo.models import Transformer
from octavo.settings import from_dict
from octavo.train import checkpoint
from octavo.train.checkpoint_folder import FOLDER, META, latest, layers_left, read_meta
from octavo.train.config import TrainConfig
from octavo.train.setup import build_model
from octavo.train.source import SOURCE


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of the trainer, and what belongs to it."""

    checkpoint: Path
    config: TrainConfig
    left: Left
    """Shapes of the linear layers that were not converted for their speed."""
    source: Checkpoint | None
    """Config and tokenizer of the checkpoint that the run began from; None if its model was new."""
    tokenizer: str | Path
    """"byte", or where a tokenizer.json lies."""

    @classmethod
    def open(cls, path: str | Path) -> SavedRun:
        """The checkpoint at `path`, or the newest of the run at `path`. Raises `ValueError` if there is none, or it is damaged."""
        path = Path(path).expanduser()
        found = path if (path / META).is_file() else latest(path / FOLDER)
        if found is None:
            raise ValueError(
                f"{path} holds no checkpoint: give the folder of a run of octavo train, or of one of its checkpoints"
            )
        meta = read_meta(found)
        values = meta["config"]
        data = {key: value for key, value in values["data"].items() if key != "fingerprint"}
        config = from_dict(TrainConfig, {**values, "data": data})
        folder = found.resolve().parent.parent / SOURCE
        source = None
        if config.model.from_ is not None:
            if not (folder / "config.json").is_file():
                raise ValueError(
                    f"{found} began from {config.model.from_}: it needs {folder}, which the run wrote; copy it too"
                )
            source = Checkpoint.open(folder)
        tokenizer = folder / "tokenizer.json"
        return cls(
            found,
            config,
            layers_left(meta),
            source,
            tokenizer if tokenizer.is_file() else config.data.tokenizer or ByteTokenizer.name,
        )

    def load_model(self, device: str | torch.device = "cpu", dtype: str | None = None) -> Transformer | CausalLM:
        """The model with its masters and recipe as they were saved; `dtype` ("bf16", "fp32") replaces that of its activations.

        Raises `ValueError` if the checkpoint is damaged.
        """
        config = self.config
        if dtype is not None:
            config = replace(config, model=replace(config.model, dtype=dtype))  # type: ignore[arg-type]
        size = load_tokenizer(self.tokenizer).vocab_size
        model = build_model(config, size, torch.device(device), self.source, resumed=True, break_even=self.left)
        checkpoint.load(self.checkpoint, model, None)
        return model
