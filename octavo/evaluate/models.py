"""From a folder to a model that can be scored.

Two kinds of folder are known, by what lies in them: a run or a checkpoint of `octavo train` (its newest checkpoint, with the
tokenizer named in its config), and a Hugging Face checkpoint (config.json, safetensors, tokenizer; nothing from the network, no
pickles), as the model of transformers or through octavo's decoder.

A recipe with FP8 products rounds the inputs and weights of the linear layers to E4M3, through `octavo.convert`, as training
with that recipe does; everything else computes in `dtype`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from octavo.convert import convert, export
from octavo.convert.break_even import deciding_by
from octavo.data.files import file_digest
from octavo.data.tokenizers import load_tokenizer
from octavo.evaluate.codec import Codec, OctavoCodec, TransformersCodec
from octavo.evaluate.scoring import BATCH_TOKENS, Scorer
from octavo.hf import CausalLM, load_decoder, load_transformers
from octavo.models import Transformer
from octavo.recipe import Recipe, get_recipe
from octavo.train import checkpoint_folder
from octavo.train.restore import SavedRun
from octavo.train.setup import choose_device
from octavo.train.source import DTYPES

Kind = Literal["octavo", "Hugging Face"]
DEFAULT_WINDOW = 2048
"""Tokens, for a model without a limit in its config."""


@dataclass(frozen=True)
class Source:
    """Where a model lies, before it is loaded."""

    path: Path
    """The folder with the tensors: of a run, its newest checkpoint."""
    kind: Kind
    name: str
    """The last part of the path that the user gave."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, and what is needed to score texts with it."""

    model: nn.Module
    codec: Codec
    scorer: Scorer
    recipe: Recipe
    description: dict[str, Any]
    """What results say of the model: name, path, kind, parameters, dtype, checksums of its files."""

    @property
    def is_decoder(self) -> bool:
        """Whether it is octavo's own decoder, and not a model of transformers."""
        return isinstance(self.model, Transformer)


def find_model(path: str | Path) -> Source:
    """What kind of model lies at `path`. Raises `ValueError` if none does."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(
            f"{folder} {what}: a model is a folder, of a run of octavo train or with config.json and safetensors"
        )
    name = folder.resolve().name or "model"
    if (folder / checkpoint_folder.META).is_file() or checkpoint_folder.latest(folder / "checkpoints") is not None:
        return Source(SavedRun.open(folder).checkpoint, "octavo", name)
    if (folder / "config.json").is_file():
        return Source(folder, "Hugging Face", name)
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
    raise ValueError(
        f"{folder} holds no model: found {found}; wanted checkpoints/ of octavo train, {checkpoint_folder.META} of one checkpoint, "
        "or config.json and safetensors of Hugging Face"
    )


def load_model(
    path: str | Path,
    recipe: str | Recipe | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    window: int | None = None,
    batch_tokens: int | None = None,
    add_bos: bool | None = None,
    through: str = "transformers",
) -> LoadedModel:
    """The model at `path` on `device`, in eval mode.

    Args:
        recipe: None is the one that a run was trained with, and `bf16` (nothing is rounded to FP8) for a Hugging Face model.
        dtype: of the activations outside FP8 products, `fp32` or `bf16`; `auto` is FP32 on the CPU and BF16 on a GPU.
        window: most tokens that the model sees at once; None is as many as it was built for.
        batch_tokens: tokens of a batch, see `octavo.evaluate.scoring`; None is a default for the device.
        add_bos: see `HarnessLM`; a tokenizer of transformers is told, too, that of a new run has no special tokens.
        through: for a Hugging Face checkpoint, its model of `transformers`, or `octavo`'s decoder with the same weights.

    Raises `ValueError` if the folder holds no model, a damaged one, tensors that do not fit, a tokenizer of another vocabulary, or
    if the window is larger than the model's.
    """
    source = find_model(path)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: use auto, {' or '.join(DTYPES)}")
    if through not in ("transformers", "octavo"):
        raise ValueError(f"through is {through!r}: use 'transformers' or 'octavo'")
    place = choose_device(device)
    compute = dtype if dtype != "auto" else ("fp32" if place.type == "cpu" else "bf16")
    wanted = None if recipe is None else get_recipe(recipe)
    if source.kind == "octavo":
        parts = _load_run(source, wanted, compute, place, add_bos)
    else:
        load = _load_transformers if through == "transformers" else _load_decoder
        parts = load(source, wanted or get_recipe("bf16"), DTYPES[compute], place, _tokenizer(source.path, add_bos))
    if window is not None and not 2 <= window <= parts.window:
        raise ValueError(f"the window is {window}, and {source.path} takes 2 to {parts.window} tokens")
    budget = BATCH_TOKENS.get(place.type, BATCH_TOKENS["cpu"]) if batch_tokens is None else batch_tokens
    model = parts.model.eval()
    return LoadedModel(
        model,
        parts.codec,
        Scorer(parts.forward.eval(), window or parts.window, budget, place),
        parts.recipe,
        {
            "name": source.name,
            "path": str(source.path),
            "kind": source.kind,
            "through": "octavo" if isinstance(model, Transformer) else "transformers",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": compute,
            "files": checksums(source.path),
        },
    )


class _Parts(NamedTuple):
    model: nn.Module
    forward: nn.Module
    """What gives logits as one tensor: the model, or a wrapper around it."""
    codec: Codec
    window: int
    recipe: Recipe


def _load_run(source: Source, recipe: Recipe | None, dtype: str, device: torch.device, add_bos: bool | None) -> _Parts:
    run = SavedRun.open(source.path)
    forward = run.load_model(device, dtype)
    if isinstance(forward, CausalLM):
        model, window = forward.model, forward.max_seq_len or DEFAULT_WINDOW
    else:
        model, window = forward, forward.config.max_seq_len
    recipe = recipe or run.config.recipe
    if recipe != run.config.recipe:
        export(forward)
        convert(forward, recipe, break_even=False)
    return _Parts(model, forward, _run_codec(run, add_bos), window, recipe)


def _run_codec(run: SavedRun, add_bos: bool | None) -> Codec:
    """A run that began from a checkpoint has its special tokens too, so that its scores are those of its export."""
    if run.source is not None and (run.source.path / "tokenizer_config.json").is_file():
        return _tokenizer(run.source.path, add_bos)
    if add_bos is not None:
        warnings.warn(
            f"--bos and --no-bos do nothing for {run.checkpoint}: tokenizers of octavo have no special tokens",
            stacklevel=4,
        )
    return OctavoCodec(load_tokenizer(run.tokenizer))


def _load_transformers(
    source: Source, recipe: Recipe, dtype: torch.dtype, device: torch.device, codec: Codec
) -> _Parts:
    model = load_transformers(source.path, parameters=dtype).model.to(device).requires_grad_(False)
    forward = CausalLM(model, torch.float32)  # without autocast: the model itself is in `dtype`
    _check_vocabulary(source.path, codec.size, forward.vocab_size)
    convert(model, recipe, break_even=False)  # what FP8 does to the scores is asked, not to the time
    return _Parts(model, forward, codec, forward.max_seq_len or DEFAULT_WINDOW, recipe)


def _load_decoder(source: Source, recipe: Recipe, dtype: torch.dtype, device: torch.device, codec: Codec) -> _Parts:
    with deciding_by(None):
        model = load_decoder(source.path, recipe=recipe, device=device, dtype=dtype).requires_grad_(False)
    _check_vocabulary(source.path, codec.size, model.config.vocab_size)
    return _Parts(model, model, codec, model.config.max_seq_len, recipe)


def _tokenizer(path: Path, add_bos: bool | None) -> Codec:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "a Hugging Face model needs the package transformers: pip install '.[eval]' in octavo's folder"
        ) from None
    options = {} if add_bos is None else {"add_bos_token": add_bos}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, **options)
    except Exception as error:  # a damaged tokenizer.json raises what its parser pleases
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{path} has no tokenizer that transformers can read: {reason}") from None
    return TransformersCodec(tokenizer)


def _check_vocabulary(path: Path, tokens: int, rows: int) -> None:
    if tokens > rows:
        raise ValueError(
            f"the tokenizer in {path} has {tokens:,} tokens and the checkpoint an embedding of {rows:,}: "
            "they are of different models, take the tokenizer that the checkpoint was trained with"
        )
    if rows - tokens > max(1024, rows // 20):  # more than padding to a round number
        warnings.warn(
            f"the tokenizer in {path} has {tokens:,} tokens and the checkpoint an embedding of {rows:,}: "
            "check that they are of one model",
            stacklevel=2,
        )


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in `folder`, by its name below it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def sha256(path: Path) -> str:
    """Of the bytes of a file, as 64 hexadecimal digits."""
    return file_digest(path, "sha256")
