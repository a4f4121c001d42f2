"""AdamW on (codes, scale) pairs: one pass over each parameter.

All arithmetic is FP32, one IEEE operation after the other in the order written below, without fused multiply-add: the Triton kernel
repeats it bit for bit. Only storage is low precision. With t the step, c_t the bound of `octavo.kernels.reference.adamw_scalars`:

    g = grad                            Adam: g = g + wd·p
    m = β1·m + (1-β1)·g
    v = β2·v + (1-β2)·(g·g)
    r = (m · b1) / max(√v · b2 + ε, 2^-126), cut to ±c_t;  b1 = 1 / (1-β1^t), b2 = 1 / √(1-β2^t)
    p = p - lr·(r + wd·p)               Adam: p = p - lr·r

and p, m and v (or √v) are rounded back to their formats. (Where v and ε are 0, m is 0 too, and then r.) Cutting r is exact Adam as
long as m and v are exact, which never reaches c_t; a moment rounded to three mantissa bits can, and without the cut (`clamp_ratio`)
p would saturate at the scale predicted for it.

Scales are powers of two. A tensor with one scale gets it before the pass, from an upper bound, so that nothing saturates; a tensor
with blocks of scales, over its flattened elements, gets each from the exact maximum inside the pass. The pass also returns the
exact maxima that the next step's bounds start from. The alternative, a pass for the maxima and another for the update, reads the
6 B of a parameter twice.

Rounding is stochastic for both moments too. To nearest, an E4M3 m stalls as soon as its change is under half a step: of a gradient
with a constant mean in noise it accumulates 85% at beta1 = 0.9, 69% at 0.95 and 38% at 0.99, where stochastic rounding keeps 100%
(with 5-10% of noise, which averages out); v stalls likewise as beta2 nears 1. The random bits hash (key, global index of the element),
so they are the same however parameters are grouped, sharded or resumed. One hash serves all three roundings of an element: each
takes the top bits of its word times an odd factor. Three hashes were a fifth of the instructions of the pass, which is bound by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.reference.cast import amax, multiply, round_stochastic, scale_from_amax, uncast
from octavo.kernels.reference.random import random_bits
from octavo.kernels.reference.residual import uncast_residual

SMALLEST_DENOMINATOR = 2.0**-126
"""Of the ratio, FP32's smallest normal."""
MULTIPLIERS = (1, 0x2C1B3C6D, 0x297A2D39)
"""Odd factors that make the random words of p, m and v from the hash of an element."""
CHUNK = 2**18
"""Elements updated at a time, a multiple of every block: bounds the FP32 temporaries, and keeps them in cache."""


@dataclass(frozen=True)
class UpdateFormats:
    """Everything static about the update of one parameter."""

    param: Format
    exp_avg: Format
    exp_avg_sq: Format
    param_scaled: bool = False
    """Whether the parameter has a scale; a plain one keeps the scale 1."""
    exp_avg_block: int | None = None
    exp_avg_sq_block: int | None = None
    sqrt_exp_avg_sq: bool = False
    """`exp_avg_sq` holds √v."""
    clamp_ratio: bool = True
    """Cut the update ratio to ±c_t."""
    stochastic: bool = True
    """Rounding of the parameter and both moments; otherwise to nearest."""
    decoupled: bool = True
    """AdamW; otherwise weight decay is added to the gradient (Adam)."""


class Scalars(NamedTuple):
    """What changes from step to step, FP32 on the device: 0-d here, columns [parameters] where they are computed.

    Each scale comes as the reciprocal of what the codes carry now, and as what they shall carry; 1 for FP32, and for blocks.
    """

    lr: Tensor
    beta1: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    eps: Tensor
    weight_decay: Tensor
    unbias1: Tensor
    """1 / (1-β1^t)."""
    sqrt_unbias2: Tensor
    """1 / √(1-β2^t)."""
    ratio_bound: Tensor
    grad_factor: Tensor
    """Reciprocal scale of the gradient, negative to maximize."""
    param_factor: Tensor
    param_scale: Tensor
    exp_avg_factor: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_factor: Tensor
    exp_avg_sq_scale: Tensor


class Operands(NamedTuple):
    """The tensors of one parameter, contiguous and flat."""

    param: Tensor
    """Codes [n] of the format, as are the moments."""
    grad: Tensor
    """[n] FP32, BF16, FP16 or E4M3."""
    residual: Tensor | None
    """int8 [n], the low bytes of an E4M11 gradient."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scales: Tensor | None
    """FP32 [ceil(n / block)], rewritten; None without blocks."""
    exp_avg_sq_scales: Tensor | None
    offset: int
    """Global index of the first element, for the random bits."""


def adamw(
    operands: Sequence[Operands], scalars: Tensor, keys: Tensor, ok: Tensor, amaxes: Tensor, formats: UpdateFormats
) -> None:
    """One step of n parameters of the same formats, in place; nothing happens if `ok` (0-d bool) is false.

    Args:
        operands: the parameters; all have a residual, or none.
        scalars: FP32 [n, fields of `Scalars`].
        keys: int32 [n], of the random bits; see `octavo.kernels.reference.random`.
        amaxes: FP32 [n, 3], raised to the largest magnitudes among the new *codes* of param, exp_avg and exp_avg_sq; not for those
            in blocks.
    """
    if ok.item():
        for one, row, key, maxima in zip(operands, scalars.unbind(), keys.unbind(), amaxes.unbind(), strict=True):
            _update(one, Scalars(*row.unbind()), key, maxima, formats)


def _update(operands: Operands, s: Scalars, key: Tensor, amaxes: Tensor, formats: UpdateFormats) -> None:
    param, grad, residual, exp_avg, exp_avg_sq, exp_avg_scales, exp_avg_sq_scales, offset = operands

    def load(codes: Tensor, factor: Tensor, scales: Tensor | None, block: int | None, start: int) -> Tensor:
        codes = codes[start : start + CHUNK]
        if scales is None or block is None:
            return codes.float() * factor
        return uncast(codes, scales[start // block : (start + CHUNK) // block], block=block)

    def store(
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        scales: Tensor | None,
        block: int | None,
        start: int,
        word: Tensor | None,
    ) -> Tensor:
        fmt = Format.of(codes.dtype)
        if scales is not None and block is not None:
            scale = scale_from_amax(amax(x, block=block), fmt.max)
            scales[start // block : (start + CHUNK) // block] = scale
        new = round_to(multiply(x, scale, block), fmt, word)
        codes[start : start + CHUNK] = new
        return new

    for start in range(0, param.numel(), CHUNK):
        p = load(param, s.param_factor, None, None, start)
        g = _gradient(grad, residual, s.grad_factor, start)
        if not formats.decoupled:
            g = g + s.weight_decay * p
        m = load(exp_avg, s.exp_avg_factor, exp_avg_scales, formats.exp_avg_block, start)
        m = s.beta1 * m + s.one_minus_beta1 * g
        v = load(exp_avg_sq, s.exp_avg_sq_factor, exp_avg_sq_scales, formats.exp_avg_sq_block, start)
        if formats.sqrt_exp_avg_sq:
            v = v * v
        v = s.beta2 * v + s.one_minus_beta2 * (g * g)
        root = v.double().sqrt().float()  # IEEE: the FP32 square root of torch is not correctly rounded on every CPU
        ratio = (m * s.unbias1) / (root * s.sqrt_unbias2 + s.eps).clamp(min=SMALLEST_DENOMINATOR)
        ratio = ratio.clamp(-s.ratio_bound, s.ratio_bound)
        if formats.decoupled:
            ratio = ratio + s.weight_decay * p
        p = p - (s.lr * ratio + 0.0)  # (subtracting -0 would change p = -0)

        words: list[Tensor | None] = [None, None, None]
        if formats.stochastic:
            word = random_bits(key, offset + start, p.numel(), p.device)
            words = [word * multiplier for multiplier in MULTIPLIERS]
        second = root if formats.sqrt_exp_avg_sq else v
        new = (
            store(p, param, s.param_scale, None, None, start, words[0]),
            store(m, exp_avg, s.exp_avg_scale, exp_avg_scales, formats.exp_avg_block, start, words[1]),
            store(second, exp_avg_sq, s.exp_avg_sq_scale, exp_avg_sq_scales, formats.exp_avg_sq_block, start, words[2]),
        )
        for which, block in enumerate((None, formats.exp_avg_block, formats.exp_avg_sq_block)):
            if block is None:
                amaxes[which] = torch.maximum(amaxes[which], amax(new[which]))


def round_to(y: Tensor, fmt: Format, word: Tensor | None) -> Tensor:
    """Codes of `y` (FP32, scaled), saturated, rounded stochastically by the top bits of `word` (int32) or to nearest."""
    y = y.clamp(-fmt.max, fmt.max)
    if word is not None and fmt.mantissa_bits < 23:
        y = round_stochastic(y, word, fmt)
    return y.to(fmt.dtype)


def _gradient(grad: Tensor, residual: Tensor | None, factor: Tensor, start: int) -> Tensor:
    grad = grad[start : start + CHUNK]
    if residual is None:
        return grad.float() * factor
    return uncast_residual(grad, residual[start : start + CHUNK], torch.ones_like(factor)) * factor
