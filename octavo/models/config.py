"""Shapes of the decoder, in two dialects, and what they cost.

Both dialects are pre-norm decoders with rotary positions and no biases in their linear layers. "gpt" is the model of FP8-LM's
Table 1: LayerNorm and a GELU feed-forward of 4·dim. "llama" has RMSNorm, SwiGLU and, if `n_kv_heads` is smaller, grouped-query
attention. The rows of Table 1 and a few more are in `SIZES`. Published families differ from these in small ways, which are
fields of the config: biases (GPT-2, Qwen2), learned positions (GPT-2), heads wider or narrower than dim / n_heads (Mistral),
stretched rotary positions (LLaMA 3.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

VOCAB_MULTIPLE = 64
"""The embedding has its rows rounded up to this, so that the head's GEMM fits the tensor cores' tiles."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched, so that a model reads longer texts than those it began with.

    "linear" divides all by `factor`. "llama3" divides those that turn less than `low_freq_factor` times within the `original`
    positions by `factor`, keeps those that turn more than `high_freq_factor` times, and interpolates between.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original: int = 8192
    """Positions that the model was first trained with."""

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"the kind of rotary scaling is {self.kind!r}: use 'linear' or 'llama3'")
        if not self.factor >= 1 or self.original < 1:
            raise ValueError(
                f"rotary scaling by {self.factor} from {self.original} positions: the factor must be at least 1, the positions too"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rotary scaling has low_freq_factor={self.low_freq_factor} and high_freq_factor={self.high_freq_factor}: "
                "the first must be positive and smaller"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer. Raises `ValueError` for numbers that do not fit together."""

    dialect: Literal["gpt", "llama"] = "gpt"
    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    n_kv_heads: int | None = None
    """Heads of keys and values; None is as many as query heads."""
    ffn_dim: int | None = None
    """Width of the feed-forward layer; None is 4·dim, for "llama" 8/3·dim rounded up to a multiple of 256."""
    head_size: int | None = None
    """Channels of a head; None is dim / n_heads."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of attention's output projection."""
    ffn_bias: bool = False
    positions: Literal["rotary", "learned"] = "rotary"
    """"learned" adds a row for each of the `max_seq_len` positions to the embedding and rotates nothing."""
    vocab_size: int = 50_257
    max_seq_len: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    dtype: torch.dtype = torch.bfloat16
    """Precision of the activations from the embedding on; parameters stay as they are created, FP32, unless a recipe says else."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it. "selective": what lies between linear layers and costs no GEMM of theirs,
    attention with its rotation and SwiGLU's product. "full": each block, from its input."""
    recompute_layers: int | None = None
    """How many blocks "full" computes again, the first ones; None is all."""
    fused: bool = False
    """Run blocks whose layers are converted through kernels that write FP8 themselves (`octavo.linear.fused`)."""

    def __post_init__(self) -> None:
        if self.dialect not in ("gpt", "llama"):
            raise ValueError(f"dialect is {self.dialect!r}: use 'gpt' or 'llama'")
        if self.positions not in ("rotary", "learned"):
            raise ValueError(f"positions is {self.positions!r}: use 'rotary' or 'learned'")
        if self.recompute not in ("none", "selective", "full"):
            raise ValueError(f"recompute is {self.recompute!r}: use 'none', 'selective' or 'full'")
        if self.recompute_layers is not None and (self.recompute != "full" or self.recompute_layers < 1):
            raise ValueError(
                f"recompute_layers is {self.recompute_layers} with recompute={self.recompute!r}: "
                "set recompute='full', of which it says how many blocks, at least one, are computed again, or leave it out"
            )
        for field in ("dim", "n_layers", "n_heads", "kv_heads", "ffn_width", "vocab_size", "max_seq_len", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be positive")
        if self.head_size is None and self.dim % self.n_heads or self.head_dim % 2:
            raise ValueError(
                f"dim={self.dim} over n_heads={self.n_heads} must give an even number of channels a head (it is {self.head_dim})"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.kv_heads}")

    @property
    def recomputed_layers(self) -> int:
        """Blocks that backward computes again from their input, the first ones."""
        if self.recompute != "full":
            return 0
        return self.n_layers if self.recompute_layers is None else min(self.recompute_layers, self.n_layers)

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads if self.head_size is None else self.head_size

    @property
    def attention_width(self) -> int:
        """Channels of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_width(self) -> int:
        if self.ffn_dim is not None:
            return self.ffn_dim
        return 4 * self.dim if self.dialect == "gpt" else math.ceil(8 * self.dim / 3 / 256) * 256

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that every token is multiplied by: the linear layers and the head, without the embedding's rows and norms."""
        qkv = (self.n_heads + 2 * self.kv_heads) * self.head_dim
        up = self.ffn_width * (1 if self.dialect == "gpt" else 2)
        block = self.dim * (qkv + self.attention_width + up + self.ffn_width)
        return self.n_layers * block + self.padded_vocab_size * self.dim

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        norms = (2 * self.n_layers + 1) * self.dim * (2 if self.dialect == "gpt" else 1)
        embedding = 0 if self.tie_embeddings else self.padded_vocab_size * self.dim
        positions = self.max_seq_len * self.dim if self.positions == "learned" else 0
        up = self.ffn_width * (1 if self.dialect == "gpt" else 2)
        biases = (
            self.qkv_bias * (self.n_heads + 2 * self.kv_heads) * self.head_dim
            + self.out_bias * self.dim
            + self.ffn_bias * (up + self.dim)
        )
        return self.num_matmul_parameters + embedding + norms + positions + self.n_layers * biases

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward per token: 6 per matmul parameter + 6·layers·seq_len·heads·D for causal attention.

        The attention term counts the half of the score matrix that a causal mask keeps (a mean of seq_len/2 keys a query; two
        products forward and four backward, 2 FLOPs each). Recomputation is not counted: it is the machine's work, not the model's.
        """
        return 6.0 * self.num_matmul_parameters + 6.0 * self.n_layers * seq_len * self.attention_width


def _gpt(dim: int, n_layers: int, n_heads: int) -> TransformerConfig:
    return TransformerConfig("gpt", dim, n_layers, n_heads)


def _llama(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, vocab_size: int, **others: int | float | bool
) -> TransformerConfig:
    return TransformerConfig("llama", dim, n_layers, n_heads, ffn_dim=ffn_dim, vocab_size=vocab_size, **others)  # type: ignore[arg-type]


SIZES: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig("gpt", 64, 2, 2, vocab_size=257, max_seq_len=256, tie_embeddings=True),
    "tiny-llama": TransformerConfig("llama", 64, 2, 4, 2, vocab_size=257, max_seq_len=256, tie_embeddings=True),
    "demo": TransformerConfig("gpt", 256, 6, 4, vocab_size=257, max_seq_len=512),
    "125m": _gpt(768, 12, 12),  # FP8-LM, Table 1
    "350m": _gpt(1024, 24, 16),
    "1b3": _gpt(2048, 24, 16),
    "7b": _gpt(4096, 32, 32),  # Table 1
    "13b": _gpt(5120, 40, 40),  # Table 1
    "175b": _gpt(12288, 96, 96),  # Table 1
    "llama-1b": _llama(
        2048, 16, 32, 8192, 128_256, n_kv_heads=8, rope_theta=5e5, max_seq_len=8192, tie_embeddings=True
    ),
    "llama-7b": _llama(4096, 32, 32, 11_008, 32_000, max_seq_len=4096),
    "llama-8b": _llama(4096, 32, 32, 14_336, 128_256, n_kv_heads=8, rope_theta=5e5, max_seq_len=8192),
    "llama-13b": _llama(5120, 40, 40, 13_824, 32_000, max_seq_len=4096),
}
"""Configurations by name; the GPT sizes with the vocabulary of GPT-2, the LLaMA sizes as published."""
