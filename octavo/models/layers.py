"""Layers that compute in the dtype of their input, so that no autocast is needed.

The residual stream sets the precision: a layer casts its own parameters to its input's dtype. Parameters may then be FP32,
BF16 or a `ScaledTensor`, and an FP8 conversion finds plain linear layers. Statistics of norms and the rotation of queries
and keys are FP32 inside.

Selective recomputation drops what the cheapest work brings back. In bytes a token and layer (BF16, d = C, docs/memory.md):

    attention with its rotation    queries, keys and output 6·d     2·T·d FLOPs, 3 % of the block's at T 2048, d 4096
    SwiGLU's product               silu(gate) 2·F                   elementwise
    the up projection, or a block  8·d, or 23·d                     8·d², or 24·d²: four times the FLOPs a byte at d 4096, T 2048

Shapes: B sequences, T tokens, H query heads, G key/value heads, D channels of a head, C = H·D channels, F feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from octavo import kernels
from octavo.models.config import RopeScaling, TransformerConfig

ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Fastest first; PyTorch on its own would take flash, 1.7 times slower on an H200."""


class Linear(nn.Linear):
    """y = x Wᵀ + b in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in the dtype of x, FP32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square normalisation in the dtype of x, FP32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: TransformerConfig) -> LayerNorm | RMSNorm:
    """The norm of the dialect, over the residual stream."""
    norm = LayerNorm if config.dialect == "gpt" else RMSNorm
    return norm(config.dim, eps=config.norm_eps)


def rotary_table(
    seq_len: int, head_dim: int, theta: float, device: torch.device, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · theta^(-2i/D), the frequencies stretched by `scaling`, FP32 [T, D/2].

    Computed at each forward rather than kept in a buffer, which `model.to(bfloat16)` would round and a meta device would lose.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if scaling is not None:
        frequencies = _stretch(frequencies, scaling)
    angles = torch.arange(seq_len, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """The frequencies, radians a position, divided as `RopeScaling` says."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original * frequencies / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(slow, frequencies, share.clamp(0, 1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates channel pairs (i, i + D/2) of x [B, T, heads, D] by angles [T, D/2] or [B, T, D/2]; FP32 inside."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotary(torch.autograd.Function):
    """`rotate` of the first heads of a tensor [B, T, heads, D], in one pass: see `octavo.kernels.rotary`."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rotated = rotated
        return kernels.rotary(heads, cos, sin, rotated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return kernels.rotary(gradients[0], cos, sin, ctx.rotated, backward=True), None, None, None


def document_places(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Where tokens stand in their documents, int64 [B, T] from 0, and which others each one sees, bool [B, 1, T, T].

    `documents` [B, T] holds a number for each token; neighbours with equal numbers are of one document. The mask is causal and
    block-diagonal, a byte for each pair of tokens of a sequence, made once for all blocks.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    first = torch.where(begins, index, 0).cummax(dim=1).values
    mask = (index[:, None] >= index) & (index >= first[:, :, None])
    return index - first, mask[:, None]


def best_attention(device: torch.device) -> AbstractContextManager:
    """In this context, attention on a GPU takes the fastest backend that can do it."""
    return sdpa_kernel(ATTENTION_BACKENDS, set_priority=True) if device.type == "cuda" else nullcontext()


def forgetful(function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """function(*inputs), of which backward keeps nothing but the inputs and runs it again."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


class Attention(nn.Module):
    """Causal self-attention, one GEMM for queries, keys and values.

    Without a mask the fastest kernels of `ATTENTION_BACKENDS` run; with one, those that take a mask.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.n_heads, self.kv_heads, self.head_dim = config.n_heads, config.kv_heads, config.head_dim
        self.rotary = config.positions == "rotary"
        self.recompute = config.recompute == "selective"
        self.fused = config.fused
        self.qkv = Linear(config.dim, (self.n_heads + 2 * self.kv_heads) * self.head_dim, bias=config.qkv_bias)
        self.out = Linear(config.attention_width, config.dim, bias=config.out_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, T, C] → [B, T, C]; a token sees those before it, or those that `mask` bool [B, 1, T, T] lets it see."""
        return self.out(self.attend(self.qkv(x).unflatten(-1, (-1, self.head_dim)), cos, sin, mask))

    def attend(self, heads: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Queries, keys and values [B, T, H + 2·G, D] → what the heads read, [B, T, H·D]."""
        return self._maybe_forgetful(self._attend, heads, cos, sin, mask)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Queries and keys, turned, and values, [B, T, H or G, D] → what the heads read, [B, T, H·D]."""
        return self._maybe_forgetful(self._mix, q, k, v, mask)

    def _attend(self, heads: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        if self.rotary and self.fused:
            heads = _Rotary.apply(heads, cos, sin, self.n_heads + self.kv_heads)
        q, k, v = heads.split((self.n_heads, self.kv_heads, self.kv_heads), dim=-2)
        if self.rotary and not self.fused:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self._mix(q, k, v, mask)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        grouped = self.kv_heads != self.n_heads
        if grouped and mask is not None:  # the memory-efficient kernel, which takes a mask, knows no groups
            k, v = (t.repeat_interleave(self.n_heads // self.kv_heads, dim=-2) for t in (k, v))
            grouped = False
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=grouped,
        )
        return y.transpose(1, 2).flatten(-2)

    def _maybe_forgetful(self, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        """function(*inputs), or `forgetful` of it; backward runs outside of the context that chose the kernel."""
        if not self.recompute:
            return function(*inputs)

        def again(x: Tensor, *others: Tensor | None) -> Tensor:
            with nullcontext() if is_compiling() else best_attention(x.device):  # (compiling chooses the kernel once)
                return function(x, *others)

        return forgetful(again, *inputs)


class GELUFeedForward(nn.Module):
    """out(gelu(up(x)))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = Linear(config.dim, config.ffn_width, bias=config.ffn_bias)
        self.out = Linear(config.ffn_width, config.dim, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x), approximate="tanh"))


class SwiGLUFeedForward(nn.Module):
    """out(silu(gate(x)) · up(x)), one GEMM for gate and up: rows 0 … F-1 of its weight are the gate's."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.ffn_width, bias=config.ffn_bias)
        self.out = Linear(config.ffn_width, config.dim, bias=config.ffn_bias)
        self.recompute = config.recompute == "selective"

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        return self.out(forgetful(swiglu, gate_up) if self.recompute else swiglu(gate_up))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of gate_up [..., 2·F], gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.ffn_norm = make_norm(config)
        self.ffn = GELUFeedForward(config) if config.dialect == "gpt" else SwiGLUFeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, T, C] → [B, T, C], in the dtype of x; `mask` as in `Attention`."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.ffn(self.ffn_norm(x))
