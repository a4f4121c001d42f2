"""A run is one frozen `TrainConfig`; everything that a run depends on is in it, and it is saved with the run.

A preset is a function that returns a complete config (`octavo.train.presets`), so a variant is three lines:

    config = presets.demo()
    config = override(config, ["optim.lr=1e-3", "recipe=O1", "recipe.exp_avg=BF16"])
    Trainer(config).run()

Overrides are typed by the fields themselves: `1e3` is an int where an int is wanted, `none` is None where None is allowed, and
a wrong path or value raises `ValueError` that lists the closest names or the values that would do. Environment variables are
not read.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from octavo.formats import FORMATS, Format
from octavo.recipe import RECIPES, Recipe, get_recipe

C = TypeVar("C")


@dataclass(frozen=True)
class ModelConfig:
    """The decoder-only transformer; see `octavo.models.TransformerConfig`."""

    dialect: Literal["gpt", "llama"] = "gpt"
    """GPT (LayerNorm, GELU) or LLaMA (RMSNorm, SwiGLU); both with rotary positions."""
    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    n_kv_heads: int | None = None
    """Heads of keys and values; none is as many as query heads."""
    ffn_dim: int | None = None
    """Width of the feed-forward layer; none is the dialect's own choice."""
    vocab_size: int | None = None
    """Rows of the embedding; none is the tokenizer's size. Either is rounded up to a multiple of 64."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute precision of everything that the recipe does not name."""
    recompute: Literal["none", "full"] = "none"
    """`full` runs each block again in backward instead of saving its activations."""


@dataclass(frozen=True)
class DataConfig:
    """Text in, sequences of tokens out; see `octavo.data`."""

    path: str = "demo"
    """A file or folder of text (see `octavo.data.sources` for the kinds), or `demo`: the Python sources of this machine."""
    tokenizer: str = "byte"
    """`byte`, or the path of a `tokenizer.json`."""
    seq_len: int = 2048
    """Tokens of a sequence."""
    micro_batch: int = 8
    """Sequences of one forward and backward."""
    val_fraction: float = 0.01
    """Share of the documents that is held out for validation, chosen by a hash of the document."""
    max_bytes: int | None = None
    """Stop reading text after so many bytes; none reads all."""
    cache: str = "runs/cache"
    """Folder of the token shards, keyed by the text's hash."""

    def __post_init__(self) -> None:
        _require(self.seq_len >= 8, "data.seq_len", self.seq_len, "at least 8 tokens")
        _require(self.micro_batch >= 1, "data.micro_batch", self.micro_batch, "at least 1 sequence")
        _require(0 < self.val_fraction < 1, "data.val_fraction", self.val_fraction, "a share between 0 and 1")
        _require(self.max_bytes is None or self.max_bytes > 0, "data.max_bytes", self.max_bytes, "positive, or none")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW as in FP8-LM: linear warm-up, then cosine decay; the same values for every recipe."""

    lr: float = 6e-4
    """Peak learning rate."""
    warmup_steps: int = 1000
    min_lr_ratio: float = 0.1
    """Final over peak learning rate."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled decay of parameters with two or more dimensions; biases and norm gains have none."""
    clip: float | None = 1.0
    """Largest L2 norm of the whole gradient; none does not clip."""
    max_skipped: int = 20
    """Consecutive steps with a non-finite gradient after which the run stops."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", self.lr, "positive")
        _require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "0 or more")
        _require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "a share between 0 and 1")
        _require(0 <= self.beta1 < 1, "optim.beta1", self.beta1, "in [0, 1)")
        _require(0 <= self.beta2 < 1, "optim.beta2", self.beta2, "in [0, 1)")
        _require(self.eps >= 0, "optim.eps", self.eps, "0 or more")
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        _require(self.clip is None or self.clip > 0, "optim.clip", self.clip, "positive, or none")
        _require(self.max_skipped >= 1, "optim.max_skipped", self.max_skipped, "at least 1")


@dataclass(frozen=True)
class LoopConfig:
    """The training loop."""

    steps: int = 1000
    """Optimizer steps of the whole run, whether resumed or not."""
    micro_batches: int = 1
    """Micro-batches whose gradients are summed before each optimizer step."""
    compile: bool = False
    """`torch.compile` each block."""
    deterministic: bool = False
    """Ask PyTorch for deterministic kernels where it has the choice; slower."""
    eval_every: int | None = 250
    """Steps between validations; there is one at the end in any case. None: only that one."""
    eval_batches: int = 20
    """Micro-batches of held-out text of one validation; always the same ones."""

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "train.steps", self.steps, "at least 1")
        _require(self.micro_batches >= 1, "train.micro_batches", self.micro_batches, "at least 1")
        _require(
            self.eval_every is None or self.eval_every >= 1, "train.eval_every", self.eval_every, "at least 1, or none"
        )
        _require(self.eval_batches >= 1, "train.eval_batches", self.eval_batches, "at least 1")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how many to keep; there is one at the end, and one when the run is interrupted, in any case."""

    every: int | None = 500
    """Steps between checkpoints; none saves only the last step."""
    keep: int = 2
    """Newest checkpoints to keep."""

    def __post_init__(self) -> None:
        _require(self.every is None or self.every >= 1, "checkpoint.every", self.every, "at least 1, or none")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


@dataclass(frozen=True)
class LogConfig:
    """Metrics. Between two log steps the host never waits for the device."""

    every: int = 10
    """Steps between log lines; the loss and gradient norm of each step are recorded all the same."""
    stats_every: int | None = 100
    """Steps between counts of saturated and flushed values by layer group; none never counts. A step that counts runs uncompiled,
    so it takes more time and memory than others."""
    tensorboard: bool = True
    """Also write TensorBoard events, when the `tensorboard` package is installed."""

    def __post_init__(self) -> None:
        _require(self.every >= 1, "log.every", self.every, "at least 1")
        _require(
            self.stats_every is None or self.stats_every >= 1,
            "log.stats_every",
            self.stats_every,
            "at least 1, or none",
        )


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on."""

    name: str = "run"
    """Title of the run in logs and figures."""
    out: str = "runs/run"
    """Folder of metrics and checkpoints."""
    recipe: Recipe = RECIPES["O2"]
    """A recipe by name, or its single fields (`recipe.exp_avg=BF16`)."""
    seed: int = 0
    """Of the initial weights, the order of the data and stochastic rounding."""
    device: str = "auto"
    """`auto` is the GPU if there is one, else the CPU."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.data.seq_len * self.data.micro_batch * self.train.micro_batches


def _require(ok: bool, path: str, value: object, want: str) -> None:
    if not ok:
        raise ValueError(f"{path} is {value}: it must be {want}")


def override(config: C, assignments: typing.Iterable[str]) -> C:
    """`config` with each `path=value` of `assignments` applied in order.

    Raises `ValueError` for a path that no field has (with the closest names) and for a value that the field cannot take.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ValueError(f"--set takes path=value, such as optim.lr=3e-4; {assignment!r} is not of that form")
        config = _assign(config, path.strip().split("."), text.strip(), path.strip())
    return config


def _assign(config: Any, names: list[str], text: str, path: str) -> Any:
    name, *rest = names
    kinds = typing.get_type_hints(type(config))
    if name not in kinds:
        raise ValueError(f"no setting is called {path!r}; {_closest(name, path, list(kinds))}")
    value = getattr(config, name)
    if rest:
        if not dataclasses.is_dataclass(value) or isinstance(value, Format):
            raise ValueError(f"no setting is called {path!r}: {path.removesuffix('.' + '.'.join(rest))} has no parts")
        new = _assign(value, rest, text, path)
        if isinstance(new, Recipe) and rest != ["name"]:
            # A changed recipe must not go by the name of the one it was.
            new = dataclasses.replace(new, name=f"{new.name},{'.'.join(rest)}={text}")
    else:
        new = _parse(kinds[name], text, path)
    return dataclasses.replace(config, **{name: new})


def _closest(name: str, path: str, known: list[str]) -> str:
    prefix = path.removesuffix(name)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(prefix + other for other in close) + "?"
    return "there are " + ", ".join(known)


def _parse(kind: Any, text: str, path: str) -> Any:
    """`text` as a value of type `kind`, or `ValueError`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none" and type(None) in arguments:
            return None
        return _parse(next(a for a in arguments if a is not type(None)), text, path)
    if origin is Literal:
        return _choose(path, text, {str(a): a for a in arguments})
    if kind is Recipe:
        return get_recipe(_choose(path, text, {name: name for name in RECIPES}))
    if kind is Format:
        return _choose(path, text, FORMATS)
    if kind is bool:
        return _choose(path, text.lower(), {"true": True, "false": False, "1": True, "0": False})
    if kind is str:
        return text
    if kind in (int, float):
        try:
            number = float(text) if kind is float or "e" in text.lower() else int(text)
        except ValueError:
            number = float("nan")
        if not math.isfinite(number) or (kind is int and number != int(number)):
            raise ValueError(f"{path} must be {'an integer' if kind is int else 'a number'}, not {text!r}")
        return kind(number)
    raise ValueError(f"{path} is a group of settings; set one of {', '.join(typing.get_type_hints(kind))} in it")


def _choose(path: str, text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(f"{path} cannot be {text!r}; {_closest(text, text, list(choices))}")
    return choices[text]


def to_dict(config: Any) -> Any:
    """A config as plain JSON values: groups become dictionaries, formats their names."""
    if isinstance(config, Format):
        return config.name
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return config


def from_dict(kind: type[C], values: dict[str, Any]) -> C:
    """The config of type `kind` that `to_dict` turned into `values`; fields that `values` lacks take their defaults."""
    kinds = typing.get_type_hints(kind)
    unknown = [name for name in values if name not in kinds]
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no {', '.join(unknown)}: the file was written by another version of octavo"
        )
    return kind(**{name: _from_json(kinds[name], value) for name, value in values.items()})


def _from_json(kind: Any, value: Any) -> Any:
    options = typing.get_args(kind) or (kind,)
    if isinstance(value, dict):
        return from_dict(kind, value)
    if isinstance(value, str) and Format in options:
        return FORMATS[value]
    return value
