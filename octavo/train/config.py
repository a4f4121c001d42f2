"""A run is one frozen `TrainConfig`; everything that a run depends on is in it, and it is saved with the run.

A preset is a function that returns a complete config (`octavo.train.presets`), so a variant is three lines:

    config = presets.demo()
    config = override(config, ["optim.lr=1e-3", "recipe=O1", "recipe.exp_avg=BF16"])
    Trainer(config).run()

Overrides are typed by the fields themselves (`octavo.settings`). Environment variables are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from octavo.convert import BreakEven
from octavo.recipe import RECIPES, Recipe
from octavo.settings import require


@dataclass(frozen=True)
class ModelConfig:
    """The decoder-only transformer, new (see `octavo.models.TransformerConfig`) or from a checkpoint (see `octavo.hf`).

    With `from_` the checkpoint decides the architecture: settings of it that are not None must agree.
    `ModelConfig.from_checkpoint` leaves them all None, as does `--set model.from=PATH`.
    """

    from_: str | None = None
    """Hugging Face checkpoint to continue from: a folder with config.json and safetensors, or a GGUF file; none begins anew."""
    as_: Literal["decoder", "transformers"] = "decoder"
    """What a checkpoint becomes: octavo's own decoder, or the model of the library transformers itself."""
    dialect: Literal["gpt", "llama"] | None = "gpt"
    """GPT (LayerNorm, GELU) or LLaMA (RMSNorm, SwiGLU); both with rotary positions."""
    dim: int | None = 768
    n_layers: int | None = 12
    n_heads: int | None = 12
    n_kv_heads: int | None = None
    """Heads of keys and values; none is as many as query heads."""
    ffn_dim: int | None = None
    """Width of the feed-forward layer; none is the dialect's own choice."""
    vocab_size: int | None = None
    """Rows of the embedding; none is the tokenizer's size. Either is rounded up to a multiple of 64."""
    rope_theta: float | None = 10_000.0
    norm_eps: float | None = 1e-5
    tie_embeddings: bool | None = False
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute precision of everything that the recipe does not name."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: attention and SwiGLU's product, or each block from its input."""
    recompute_layers: int | None = None
    """How many blocks `full` computes again, the first ones, whose activations would be kept longest; none is all."""
    fused: bool = True
    """Norms, activations and rotations of converted blocks as kernels that write FP8 themselves."""
    break_even: str | None = "auto"
    """Linear layers that FP8 makes slower on this GPU, at the tokens of a micro-batch, stay as they are: `auto` asks octavo's own
    measurements, a path those of `octavo bench --break-even`; none converts all, which takes less memory. A run that resumes keeps
    its layers."""

    DECIDED_BY_FROM: ClassVar[tuple[str, ...]] = (
        "dialect",
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "ffn_dim",
        "vocab_size",
        "rope_theta",
        "norm_eps",
        "tie_embeddings",
    )

    def __post_init__(self) -> None:
        if self.from_ is None:
            optional = ("n_kv_heads", "ffn_dim", "vocab_size")
            unset = [name for name in self.DECIDED_BY_FROM if name not in optional and getattr(self, name) is None]
            if unset:
                raise ValueError(
                    f"model.{unset[0]} is none: a new model needs it; only model.from=PATH decides it otherwise"
                )

    @classmethod
    def from_checkpoint(cls, path: str, **settings: Any) -> ModelConfig:
        """The config of a model that continues from the checkpoint at `path`, with further settings."""
        return cls(**{**dict.fromkeys(cls.DECIDED_BY_FROM), "from_": path, **settings})


@dataclass(frozen=True)
class DataConfig:
    """Text in, sequences of tokens out; see `octavo.data`."""

    path: str = "demo"
    """A file or folder of text (see `octavo.data.sources` for the kinds), the folder of a prepared corpus (`octavo prepare`), or
    `demo`: the Python sources of this machine."""
    tokenizer: str | None = None
    """`byte`, or the path of a `tokenizer.json`; none is the one of a prepared corpus, else of `model.from`, else `byte`."""
    seq_len: int = 2048
    """Tokens of a sequence."""
    micro_batch: int = 8
    """Sequences of one forward and backward."""
    val_fraction: float = 0.01
    """Share of the documents that is held out for validation, chosen by a hash of the document."""
    documents: Literal["joined", "separate"] = "joined"
    """What a sequence makes of the documents in it: one text, or each on its own, so that no token sees another document."""
    max_bytes: int | None = None
    """Stop reading text after so many bytes; none reads all."""
    cache: str = "runs/cache"
    """Folder of the token shards, keyed by the text's hash."""

    def __post_init__(self) -> None:
        require(self.seq_len >= 8, "data.seq_len", self.seq_len, "at least 8 tokens")
        require(self.micro_batch >= 1, "data.micro_batch", self.micro_batch, "at least 1 sequence")
        require(0 < self.val_fraction < 1, "data.val_fraction", self.val_fraction, "a share between 0 and 1")
        require(self.max_bytes is None or self.max_bytes > 0, "data.max_bytes", self.max_bytes, "positive, or none")


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
    release: Literal["none", "partial", "two_pass"] = "none"
    """Update each parameter inside backward and free its gradient (`octavo.release_gradients`), with the norm to clip by taken from the
    gradients so far (`partial`) or from a backward of its own (`two_pass`). Needs train.micro_batches=1."""
    max_skipped: int = 20
    """Consecutive steps with a non-finite gradient after which the run stops."""

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", self.lr, "positive")
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "0 or more")
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "a share between 0 and 1")
        require(0 <= self.beta1 < 1, "optim.beta1", self.beta1, "in [0, 1)")
        require(0 <= self.beta2 < 1, "optim.beta2", self.beta2, "in [0, 1)")
        require(self.eps >= 0, "optim.eps", self.eps, "0 or more")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        require(self.clip is None or self.clip > 0, "optim.clip", self.clip, "positive, or none")
        require(self.max_skipped >= 1, "optim.max_skipped", self.max_skipped, "at least 1")


@dataclass(frozen=True)
class LoopConfig:
    """The training loop."""

    steps: int = 1000
    """Optimizer steps of the whole run, whether resumed or not."""
    micro_batches: int = 1
    """Micro-batches whose gradients are summed before each optimizer step."""
    compile: bool = False
    """`torch.compile` each block."""
    graph: bool = False
    """Replay forward and backward of a step from a CUDA graph, on a GPU that would otherwise wait for the host: with small models or few
    tokens. A step that counts (`log.stats_every`) runs without it, and needs its memory beside that of the graph."""
    deterministic: bool = False
    """Ask PyTorch for deterministic kernels where it has the choice; slower."""
    eval_every: int | None = 250
    """Steps between validations; there is one at the end in any case. None: only that one."""
    eval_batches: int = 20
    """Micro-batches of held-out text of one validation; always the same ones."""
    timeout: float = 600.0
    """Seconds after which a rank that does not answer ends the run, when there are several."""
    check_every: int | None = 500
    """Steps between checks that all ranks hold the same weights; none never checks."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "train.steps", self.steps, "at least 1")
        require(self.micro_batches >= 1, "train.micro_batches", self.micro_batches, "at least 1")
        require(
            self.eval_every is None or self.eval_every >= 1, "train.eval_every", self.eval_every, "at least 1, or none"
        )
        require(self.eval_batches >= 1, "train.eval_batches", self.eval_batches, "at least 1")
        require(self.timeout > 0, "train.timeout", self.timeout, "a positive number of seconds")
        require(
            self.check_every is None or self.check_every >= 1,
            "train.check_every",
            self.check_every,
            "at least 1, or none",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how many to keep; there is one at the end, and one when the run is interrupted, in any case."""

    every: int | None = 500
    """Steps between checkpoints; none saves only the last step."""
    keep: int = 2
    """Newest checkpoints to keep."""

    def __post_init__(self) -> None:
        require(self.every is None or self.every >= 1, "checkpoint.every", self.every, "at least 1, or none")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


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
        require(self.every >= 1, "log.every", self.every, "at least 1")
        require(
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

    def __post_init__(self) -> None:
        if self.data.documents == "separate" and self.model.as_ == "transformers":
            raise ValueError(
                "data.documents=separate needs model.as=decoder: models of transformers see whole sequences"
            )
        if self.train.graph and self.optim.release != "none":
            raise ValueError(
                f"train.graph replays backward without the host, which optim.release={self.optim.release} needs there: use one of the two"
            )
        if self.train.graph and self.train.compile and self.recipe.scaling == "delayed":
            raise ValueError(
                "the maxima of recipe.scaling=delayed are not counted when train.graph replays what train.compile has compiled: use two of "
                "the three"
            )

    @property
    def break_even(self) -> BreakEven | None:
        """The rule of `model.break_even` for this run."""
        table, tokens = self.model.break_even, self.data.seq_len * self.data.micro_batch
        if table is None:
            return None
        return BreakEven(tokens, self.train.compile, None if table == "auto" else table, graph=self.train.graph)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.data.seq_len * self.data.micro_batch * self.train.micro_batches
