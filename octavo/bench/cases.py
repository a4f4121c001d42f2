"""The kernels of octavo, each with inputs of one layer, the bytes that it has to move and how far it may be from its reference.

N tokens, d channels, F feed-forward width. Results that are element-wise have to agree in every bit. Where a kernel takes a function
that libdevice and PyTorch round differently (rsqrt, tanh, exp), or adds up a row in another order, a few codes differ by one step: the
relative error of all is then under `CLOSE`. FP32 sums in another order are under `SUMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.bench.run import Run
from octavo.formats import E4M3, E5M2, FP16
from octavo.kernels.reference.adamw import Operands, UpdateFormats
from octavo.kernels.reference.magnitudes import Values
from octavo.models import TransformerConfig
from octavo.models.layers import rotary_table
from octavo.models.loss import chunk_tokens

BF16 = 2
"""Bytes."""
CLOSE = 0.01
SUMS = 1e-5


@dataclass(frozen=True)
class Case:
    """One kernel and its inputs."""

    name: str
    call: Callable[..., Any]
    """call(module, *tensors), where `module` has the kernels or the references."""
    tensors: tuple[Tensor, ...]
    size: int
    """Bytes that have to be read and written."""
    shape: str
    in_graph: bool = True
    """Whether a CUDA graph can hold it: not what uploads a table of addresses."""
    bound: float = 0.0
    """Relative error to the reference; 0 where every bit has to be equal."""


def cast_cases(run: Run, config: TransformerConfig, tokens: int) -> Iterator[Case]:
    """Between BF16 and FP8."""
    x = run.normal(tokens, config.dim)
    scale = kernels.scale_from_amax(kernels.amax(x), E4M3.max)
    n, shape = x.numel(), f"{tokens} × {config.dim}"
    yield Case("amax", lambda k, x: k.amax(x), (x,), n * BF16, shape)
    yield Case("cast, E4M3", lambda k, x, s: k.cast(x, s, E4M3.dtype), (x, scale), n * (BF16 + 1), shape)
    yield Case(
        "cast_transpose, E4M3", lambda k, x, s: k.cast_transpose(x, s, E4M3.dtype), (x, scale), n * (BF16 + 2), shape
    )
    yield Case(
        "cast_transpose_amax, E5M2",
        lambda k, x, s: k.cast_transpose_amax(x, s, E5M2.dtype),
        (x, scale),
        n * (BF16 + 2),
        shape,
    )
    # With a scale from its own largest value x is read twice.
    yield Case("quantize, E4M3", lambda k, x: k.quantize(x, E4M3), (x,), n * (2 * BF16 + 2), shape)
    yield Case(
        "quantize and column sum, E5M2",
        lambda k, x: k.quantize(x, E5M2, column_sum=True),
        (x,),
        n * (2 * BF16 + 2),
        shape,
        bound=SUMS,
    )
    yield Case("cast_current, E4M3", lambda k, x: k.cast_current(x, E4M3), (x,), n * (2 * BF16 + 1), shape)
    codes = kernels.cast(x, scale, E4M3.dtype)
    yield Case("transpose_codes", lambda k, c: k.transpose_codes(c), (codes,), 2 * n, shape)
    yield Case("uncast to BF16", lambda k, c, s: k.uncast(c, s, torch.bfloat16), (codes, scale), n * (1 + BF16), shape)
    yield Case("cast_residual", lambda k, x, s: k.cast_residual(x, s), (x, scale), n * (BF16 + 2), shape)


def model_cases(run: Run, config: TransformerConfig, tokens: int) -> Iterator[Case]:
    """What stands between the linear layers of a block, and behind the head."""
    yield from _rotary_cases(run, config, tokens)
    yield from norm_cases(run, config, tokens)
    yield from activation_cases(run, config, tokens)
    yield from _head_cases(run, config, tokens)


def _rotary_cases(run: Run, config: TransformerConfig, tokens: int) -> Iterator[Case]:
    heads, turned = config.n_heads + 2 * config.kv_heads, config.n_heads + config.kv_heads
    length = min(tokens, config.max_seq_len)
    qkv = run.normal(tokens // length, length, heads, config.head_dim)
    cos, sin = rotary_table(length, config.head_dim, config.rope_theta, run.device, config.rope_scaling)
    n, shape = qkv.numel(), f"{length} tokens, {heads} heads × {config.head_dim}"
    yield Case("rotary", lambda k, x, c, s: k.rotary(x, c, s, turned), (qkv, cos, sin), 2 * n * BF16, shape)
    # Without a hint of the scale the gradients are read twice.
    yield Case(
        "rotary_backward_quantize, E5M2",
        lambda k, q, key, v, c, s: k.rotary_backward_quantize(q, key, v, c, s, E5M2),
        (*qkv.split((config.n_heads, config.kv_heads, config.kv_heads), dim=2), cos, sin),
        n * (2 * BF16 + 2),
        shape,
    )


def _head_cases(run: Run, config: TransformerConfig, tokens: int) -> Iterator[Case]:
    """A chunk of logits."""
    vocabulary = config.padded_vocab_size
    rows = min(tokens, chunk_tokens(vocabulary))
    logits = run.normal(rows, vocabulary)
    classes = torch.arange(rows, device=run.device) * 7919 % vocabulary
    n, shape = logits.numel(), f"{rows} × {vocabulary}"
    yield Case(
        "softmax_gradient, E5M2",
        lambda k, x, c, w: k.softmax_gradient(x, c, w, E5M2.dtype, 2.0**15),
        (logits, classes, torch.ones(rows, device=run.device)),
        n * (BF16 + 1),
        shape,
        bound=CLOSE,
    )
    yield Case("row_sums", lambda k, x: k.row_sums(x), (logits,), n * BF16, shape, bound=SUMS)


def norm_cases(run: Run, config: TransformerConfig, tokens: int) -> Iterator[Case]:
    """The norm of the dialect into FP8, and its backward with the gradient of the residual stream."""
    centered, eps = config.dialect == "gpt", config.norm_eps
    x, dy, residual = (run.normal(tokens, config.dim, seed=seed) for seed in range(3))
    weight = 1 + run.normal(config.dim, std=0.1, seed=3, dtype=torch.float32)
    bias = run.normal(config.dim, std=0.1, seed=4, dtype=torch.float32) if centered else None
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, eps, centered=centered)
    scale = kernels.scale_from_amax(amax, E4M3.max)
    n, shape = x.numel(), f"{'LayerNorm' if centered else 'RMSNorm'}, {tokens} × {config.dim}"
    yield Case(
        "norm_stats",
        lambda k, x, w: k.norm_stats(x, w, bias, eps, centered=centered),
        (x, weight),
        n * BF16,
        shape,
        bound=CLOSE,
    )
    yield Case(
        "norm_cast, E4M3",
        lambda k, x, w, r, s: k.norm_cast(x, w, bias, mean, r, s, E4M3.dtype),
        (x, weight, rstd, scale),
        n * (BF16 + 2),
        shape,
    )
    yield Case(
        "norm_backward",
        lambda k, dy, x, w, r, g: k.norm_backward(dy, x, w, mean, r, g),
        (dy, x, weight, rstd, residual),
        4 * n * BF16,
        shape,
        bound=CLOSE,
    )


def activation_cases(run: Run, config: TransformerConfig, tokens: int) -> Iterator[Case]:
    """The activation of the dialect into FP8, forward and backward; a scale of its own takes the pass for the maximum, too."""
    kind = "gelu" if config.dialect == "gpt" else "swiglu"
    width = config.ffn_width * (1 if kind == "gelu" else 2)
    h, da = run.normal(tokens, width), run.normal(tokens, config.ffn_width, seed=1)
    scale = kernels.scale_from_amax(kernels.activation_amax(h, kind), E4M3.max)
    grad_scale = kernels.scale_from_amax(kernels.activation_backward_amax(da, h, kind), E5M2.max)
    read, both, shape = h.numel() * BF16, (h.numel() + da.numel()) * BF16, f"{kind}, {tokens} × {config.ffn_width}"
    yield Case("activation_amax", lambda k, h: k.activation_amax(h, kind), (h,), read, shape, bound=CLOSE)
    yield Case(
        "activation_cast, E4M3",
        lambda k, h, s: k.activation_cast(h, kind, s, E4M3.dtype),
        (h, scale),
        read + 2 * da.numel(),
        shape,
        bound=CLOSE,
    )
    yield Case(
        "activation_backward_amax",
        lambda k, da, h: k.activation_backward_amax(da, h, kind),
        (da, h),
        both,
        shape,
        bound=CLOSE,
    )
    yield Case(
        "activation_backward_cast, E5M2",
        lambda k, da, h, s: k.activation_backward_cast(da, h, kind, s, E5M2.dtype),
        (da, h, grad_scale),
        both + 2 * h.numel(),
        shape,
        bound=CLOSE,
    )


def optimizer_cases(run: Run, n: int) -> Iterator[Case]:
    """The passes of the optimizer over one weight of n elements in the formats of O2."""
    formats = UpdateFormats(FP16, E4M3, FP16, param_scaled=True, exp_avg_block=128, sqrt_exp_avg_sq=True)
    values = {
        name: run.normal(n, std=std, seed=seed, dtype=torch.float32) for seed, (name, std) in enumerate(_STDS.items())
    }
    scales = {name: kernels.scale_from_amax(kernels.amax(x), _FORMATS[name].max) for name, x in values.items()}
    m_scale = kernels.scale_from_amax(kernels.amax(values["exp_avg"], block=128), E4M3.max)
    m = kernels.cast(values["exp_avg"], m_scale, E4M3.dtype, block=128)
    p, g, v = (
        kernels.cast(values[name].abs() if name == "exp_avg_sq" else values[name], scales[name], _FORMATS[name].dtype)
        for name in ("param", "grad", "exp_avg_sq")
    )
    del values
    one = torch.ones((), device=run.device)
    columns, _, ok = kernels.adamw_scalars(
        torch.tensor([5.0], device=run.device),
        torch.stack([scales["param"], one, scales["exp_avg_sq"]])[None],
        torch.stack([kernels.amax(codes) for codes in (p, m, v)])[None],
        scales["grad"][None],
        kernels.amax(g)[None],
        lr=1e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        maximize=False,
        residual=False,
        formats=formats,
    )
    scalars = torch.stack(columns, 1)
    key = kernels.make_key(0, torch.tensor(5.0, device=run.device), 0, run.device)[None]
    amaxes = torch.zeros(1, 3, device=run.device)
    moved = n * (2 * 2 + 1 + 2 * 1 + 2 * 2) + 2 * m_scale.nbytes

    def adamw(k: Any, p: Tensor, g: Tensor, m: Tensor, v: Tensor, m_scale: Tensor, amaxes: Tensor) -> None:
        k.adamw([Operands(p, g, None, m, v, m_scale, None, 0)], scalars, key, ok.all(), amaxes, formats)

    shape = f"{n / 1e6:.4g}M elements"
    yield Case("magnitudes, E4M3", lambda k, g: k.magnitudes([Values(g)]), (g,), n, shape, in_graph=False, bound=1e-12)
    yield Case("adamw, O2", adamw, (p, g, m, v, m_scale, amaxes), moved, shape, in_graph=False)


_STDS = {"param": 0.02, "grad": 1e-3, "exp_avg": 1e-4, "exp_avg_sq": 1e-3}
_FORMATS = {"param": FP16, "grad": E4M3, "exp_avg": E4M3, "exp_avg_sq": FP16}
