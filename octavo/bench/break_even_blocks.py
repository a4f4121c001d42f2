"""The blocks of `octavo bench --break-even`: forward and backward of one block of octavo's decoder in FP8 and in BF16.

FP8 is the fused block in the recipe of the run, BF16 the block whose kernels PyTorch chooses; both begin with the same BF16 parameters and
take the fastest attention. A call starts from hidden states [B, T, dim] and a gradient of the output, and casts every weight, as the
first micro-batch of a step does. Eager and compiled blocks have the launches that they have in the trainer; in a CUDA graph the eager block
has none, as with `train.graph`. The batch is dynamic for the compiler, so that a block is compiled once for all numbers of tokens.

The error is the largest over what the block adds to its input, what it adds to the gradient, and the gradients of its matrices, relative to
the uncompiled BF16 block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor, nn

from octavo.bench.linear import BASELINE, move_scales
from octavo.bench.rows import Row
from octavo.bench.run import Run, relative_error
from octavo.bench.timing import captured
from octavo.convert import convert
from octavo.convert.break_even import COMPILED, EAGER, GRAPH
from octavo.models import Transformer, TransformerConfig
from octavo.models.layers import best_attention, rotary_table
from octavo.tensor import ScaledTensor

DIALECTS: tuple[Literal["gpt", "llama"], ...] = ("gpt", "llama")
MODES = {"cuda": (EAGER, COMPILED, GRAPH), "cpu": (EAGER,)}
TOKENS = {"cuda": (4096, 16_384, 65_536), "cpu": (64, 256)}
DIMS = {"cuda": (512, 768, 1024, 1536, 2048, 4096), "cpu": (64, 128)}
SEQ_LEN = {"cuda": 2048, "cpu": 32}
"""Tokens of a sequence: at most half of the fewest, since the compiler takes a batch of one for a case of its own."""
HEAD_SIZE = 64
BOUND = 0.20
"""In random blocks of 64 to 768 channels, up to 2,048 tokens long, the largest error is 0.11 to 0.13: that of the gradient of the weight of
queries, keys and values, which comes through the backward of all other layers."""


class BlockPair:
    """A block of a dialect and width, in BF16 and in FP8, for each mode of the device."""

    def __init__(self, run: Run, dialect: Literal["gpt", "llama"], dim: int) -> None:
        self.run, self.dialect, self.dim = run, dialect, dim
        # About the 8/3 of LLaMA; one ratio for all widths leaves no holes in the grid of shapes.
        ffn_dim = None if dialect == "gpt" else dim * 11 // 4
        self.config = TransformerConfig(dialect, dim, 1, dim // HEAD_SIZE, ffn_dim=ffn_dim, vocab_size=1)
        self.fp8 = f"octavo {run.recipe.name}"
        self.blocks = {
            (variant, mode): self._build(variant, mode)
            for variant in (BASELINE, self.fp8)
            for mode in MODES[run.device.type]
        }

    @property
    def outputs(self) -> int:
        """Features of the widest linear layer."""
        return self.config.ffn_width * (1 if self.dialect == "gpt" else 2)

    def _build(self, variant: str, mode: str) -> nn.Module:
        """A block with random matrices, of variance 1 / inputs, so that the branches are no smaller than the residual stream."""
        (block,) = Transformer(dataclasses.replace(self.config, fused=variant == self.fp8)).blocks
        block.to(self.run.device, torch.bfloat16)
        with torch.no_grad():
            for index, weight in enumerate(_matrices(block)):
                weight.copy_(self.run.normal(*weight.shape, std=weight.shape[1] ** -0.5, seed=index + 2))
        if variant == self.fp8:
            convert(block, self.run.recipe, break_even=False)
        if mode == COMPILED:
            block.compile(fullgraph=True)
        return block

    def time(self, tokens: int, mode: str) -> tuple[Row, Row]:
        """The rows of BF16 and FP8, timed right after each other."""
        run = self.run
        seq_len = SEQ_LEN[run.device.type]
        shape = tokens // seq_len, seq_len, self.dim
        x, dy = run.normal(*shape).requires_grad_(), run.normal(*shape, seed=1)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        table = rotary_table(seq_len, HEAD_SIZE, self.config.rope_theta, run.device)

        def step(block: nn.Module) -> Tensor:
            x.grad = None
            block.zero_grad(set_to_none=True)  # so that a weight's FP8 operand goes after backward
            with best_attention(run.device):
                y = block(x, *table)
            y.backward(dy)
            return y.detach()

        want = _results(self.blocks[BASELINE, EAGER], x, step(self.blocks[BASELINE, EAGER]), dy)
        rows = []
        for variant in (BASELINE, self.fp8):
            block = self.blocks[variant, mode]
            for _ in range(run.settling):
                y = step(block)
                move_scales(block)
            error = relative_error(_results(block, x, y, dy), want)
            what = f"{tokens} tokens, {self.dialect} block of {self.dim}"
            row = Row("break-even", what, variant, mode, tokens=tokens, error=error, bound=BOUND)
            timed = functools.partial(step, block)
            rows.append(row.timed(run.time(captured(timed) if mode == GRAPH else timed)))
            block.zero_grad(set_to_none=True)
        return rows[0], rows[1]


def _matrices(block: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in block.parameters() if parameter.ndim == 2]


def _results(block: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> list[Tensor]:
    """What the block adds to x and to dy, and the gradients of its matrices."""
    assert x.grad is not None
    found = [y.float() - x.detach().float(), x.grad.float() - dy.float()]
    for weight in _matrices(block):
        assert weight.grad is not None
        found.append(weight.grad.dequantize() if isinstance(weight.grad, ScaledTensor) else weight.grad)
    return found
