"""What of a run decides its memory, as numbers: `Setup`, and the bytes that rest between steps.

Legend: N tokens of a micro-batch, d channels, A channels of all query heads, G those of all key heads, F feed-forward width,
V rows of the head, e bytes of an activation; |w| elements of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from octavo.convert import BreakEven
from octavo.convert.policy import MIN_SIDE
from octavo.formats import E4M3, FP32, Format
from octavo.models import TransformerConfig
from octavo.recipe import Recipe

WEIGHTS, OTHER, GRADIENTS, STATES = "weights", "other parameters", "gradients", "optimizer states"
COPIES, RESIDUAL, ATTENTION, FEED_FORWARD = "weight copies", "residual stream", "attention", "feed-forward"
HEAD, WORK = "head and loss", "workspace"
KINDS = (WEIGHTS, OTHER, GRADIENTS, STATES, COPIES, RESIDUAL, ATTENTION, FEED_FORWARD, HEAD, WORK)
"""Kinds of bytes. `weights` are those of converted layers; `weight copies` the FP8 (or BF16) operands cast from them."""


@dataclass(frozen=True)
class Setup:
    """A training step: model, recipe and how it is run."""

    model: TransformerConfig
    recipe: Recipe
    seq_len: int
    micro_batch: int
    micro_batches: int = 1
    """Micro-batches of an optimizer step."""
    compiled: bool = False
    """Blocks and loss run under `torch.compile`."""
    release: Literal["none", "partial", "two_pass"] = "none"
    device: Literal["cuda", "cpu"] = "cuda"
    """A CPU has an RMSNorm made of many operations, which keeps FP32 copies; the plan is proved there, and meant for a GPU."""
    table: str | Path | None = None
    """Measurements that decide which layers stay as they are for their speed: a file, `auto` for octavo's own; None converts all."""
    capability: str = "9.0"
    """Compute capability of the GPU that is planned for."""
    graph: bool = False
    """Steps are replayed from a CUDA graph. The first ones run as they are, so the peak is theirs."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.seq_len * self.micro_batch

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return self.model.dtype.itemsize

    @property
    def accumulates(self) -> bool:
        return self.micro_batches > 1

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block: (inputs, outputs)."""
        m = self.model
        up = m.ffn_width * (1 if m.dialect == "gpt" else 2)
        return {
            "qkv": (m.dim, (m.n_heads + 2 * m.kv_heads) * m.head_dim),
            "attention out": (m.attention_width, m.dim),
            "up": (m.dim, up),
            "ffn out": (m.ffn_width, m.dim),
        }

    @cached_property
    def left(self) -> frozenset[tuple[int, int]]:
        """Shapes of the linear layers that stay as they are because FP8 would be slower."""
        shapes = tuple(self.linears.values())
        return frozenset(shape for shape in shapes if self._slower(shape, shapes if self.fusible else ()))

    def _slower(self, shape: tuple[int, int], together: tuple[tuple[int, int], ...] = ()) -> bool:
        """Whether FP8 was measured to slow a layer of that shape down; `together` as in `BreakEven`."""
        if self.table is None or not self.recipe.converts:
            return False
        table = None if self.table == "auto" else self.table
        rule = BreakEven(self.tokens, self.compiled, table, together, self.graph)
        speedup = rule.speedup(*shape, self.capability)
        return speedup is not None and speedup < 1

    def converted(self, name: str) -> bool:
        """Whether the layer becomes FP8."""
        shape = self.linears[name]
        return self.recipe.converts and min(shape) >= MIN_SIDE and shape not in self.left

    @property
    def fp8_head(self) -> bool:
        """Whether the two backward GEMMs of the head are FP8; a tied one goes with the blocks, whatever its own speed."""
        if self.recipe.head_grad_output is None or not any(map(self.converted, self.linears)):
            return False
        shape = (self.model.dim, self.model.padded_vocab_size)
        return self.model.tie_embeddings or min(shape) >= MIN_SIDE and not self._slower(shape)

    @property
    def fusible(self) -> bool:
        """Whether blocks run through the functions of `octavo.linear.fused` once all their layers are converted."""
        return self.model.fused and self.recipe.fuses(self.compiled)

    @property
    def fused(self) -> bool:
        """Whether blocks run through the functions of `octavo.linear.fused`."""
        return self.fusible and all(map(self.converted, self.linears))

    def size(self, name: str) -> int:
        """Elements of the layer's weight."""
        inputs, outputs = self.linears[name]
        return inputs * outputs

    # --- bytes of one weight

    def weight_bytes(self, name: str) -> int:
        """Storage of the weight itself."""
        master = self.recipe.master if self.converted(name) else None
        return self.size(name) * 4 if master is None else self.size(name) * master.dtype.itemsize + 4

    def gradient_bytes(self, name: str) -> int:
        """Storage of its finished gradient, with the residual byte that sums of micro-batches have."""
        if not self.converted(name) or self.recipe.grad is None:
            return 4 * self.size(name)
        return self.size(name) * (2 if self.accumulates else 1) + 4

    def state_bytes(self, name: str) -> int:
        """Both moments with their scales, and the step."""
        return self.moment_bytes(self.size(name), self.converted(name)) + 4

    def moment_bytes(self, count: int, converted: bool = False) -> int:
        """Both moments of a matrix of `count` elements, with their scales."""
        r = self.recipe
        if not converted and r.moments_of == "converted":
            return 8 * count
        return _stored(count, r.exp_avg, r.exp_avg_block) + _stored(count, r.exp_avg_sq, r.exp_avg_sq_block)

    def operand_bytes(self, name: str) -> int:
        """The copy of the weight that eager GEMMs read, alive from forward to backward: row-major and transposed FP8, or BF16.

        An E4M3 master is its own operand, and an FP32 model multiplies FP32 weights as they are.
        """
        if self.converted(name):
            return 0 if self.recipe.master is E4M3 else 2 * self.size(name)
        return 0 if self.model.dtype == torch.float32 else self.itemsize * self.size(name)

    # --- sums

    @property
    def converted_parameters(self) -> int:
        """Elements of all converted weights."""
        return self.model.n_layers * sum(self.size(name) for name in self.linears if self.converted(name))

    @property
    def head_elements(self) -> int:
        return self.model.padded_vocab_size * self.model.dim

    @property
    def other_parameters(self) -> int:
        """Elements of embeddings, head, norms and biases, and of layers that stay plain."""
        return self.model.num_parameters - self.converted_parameters

    @property
    def other_matrices(self) -> list[int]:
        """Elements of each of the other parameters that is a matrix: plain layers, embedding, head, learned positions."""
        m = self.model
        plain = [self.size(name) for name in self.linears if not self.converted(name)] * m.n_layers
        tables = [self.head_elements] * (1 if m.tie_embeddings else 2)
        return plain + tables + ([m.max_seq_len * m.dim] if m.positions == "learned" else [])

    def resident(self) -> dict[str, int]:
        """Bytes that rest between steps, by kind."""
        layers, names = self.model.n_layers, [name for name in self.linears if self.converted(name)]
        matrices = self.other_matrices
        other_states = sum(map(self.moment_bytes, matrices)) + 8 * (self.other_parameters - sum(matrices))
        found = {
            WEIGHTS: layers * sum(self.weight_bytes(name) for name in names),
            OTHER: 4 * self.other_parameters,
            STATES: layers * sum(self.state_bytes(name) for name in names) + other_states,
        }
        return {kind: size for kind, size in found.items() if size}


def _stored(count: int, fmt: Format, block: int | None) -> int:
    scales = 0 if fmt is FP32 else 1 if block is None else -(-count // block)
    return count * fmt.dtype.itemsize + 4 * scales
