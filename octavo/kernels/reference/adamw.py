"""AdamW on (codes, scale) pairs: one pass over each parameter.

All arithmetic is FP32, one IEEE operation after the other in the order written below, without fused multiply-add: the Triton kernel
repeats it bit for bit. Only storage is low precision. The pass works on the *codes* of gradient, parameter and second moment, and what
depends on the step alone is folded into `Scalars`, which saves it a third of its multiplications. Primes are new codes; k, s the
scales before and after, so that k'/k = s/k, b1 = 1 / (1-β1^t), b2 = 1 / √(1-β2^t), and c_t the bound of `adamw_scalars`:

    g                                                             Adam: g + (wd·k_g/k_p)·p
    m = (β1/k_m)·m + ((1-β1)/k_g)·g                               real values
    u = (β2·s²/k²)·√v² + (√(1-β2)·s/k_g · g)²                     v times s²; without the root: v times s
    r = m · (1 / (√u·b2/(b1·s) + max(ε/b1, 2^-126)))              cut to ±c_t
    p' = (s_p/k_p)·p + (-lr·s_p)·(r + (wd/k_p)·p)                 Adam: … + (-lr·s_p)·r

and p', m·s_m and √u (or u) are rounded to their formats. Where u is the square of a code, √u is taken of max(u, 2^-96), which is less
than any format holds: then the square root and the reciprocal are of normal numbers only, and a GPU does each in a few instructions
without a branch. (Where v and ε are 0, m is 0 too, and then r.) Cutting r is exact Adam as long as m and v are exact, which never reaches
c_t; a moment rounded to three mantissa bits can, and without the cut (`clamp_ratio`) p would saturate at the scale predicted for it.

Scales are powers of two. A tensor with one scale gets it before the pass, from an upper bound, so that nothing saturates; a tensor
with blocks of scales, over its flattened elements, gets each from the exact maximum inside the pass. The pass also returns the
exact maxima that the next step's bounds start from. The alternative, a pass for the maxima and another for the update, reads the
6 B of a parameter twice.

Rounding is stochastic for both moments too. To nearest, an E4M3 m stalls as soon as its change is under half a step: of a gradient
with a constant mean in noise it accumulates 85% at beta1 = 0.9, 69% at 0.95 and 38% at 0.99, where stochastic rounding keeps 100%
(with 5-10% of noise, which averages out); v stalls likewise as beta2 nears 1. The random bits hash (key, global index of the element),
so they are the same however parameters are grouped, sharded or resumed. One hash serves all three roundings of an element
(`random_top_bits`). Three hashes were a fifth of the instructions of the pass, which is bound by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import FP32, Format
from octavo.kernels.reference.cast import amax, multiply, round_stochastic, scale_from_amax
from octavo.kernels.reference.random import random_top_bits
from octavo.kernels.reference.residual import uncast_residual

SMALLEST_SQUARE = 2.0**-96
"""Least u of which a root is taken, where u has a scale."""
MULTIPLIERS = (0xC2B2AE35, 0x427F9891, 0x44AA1ACD)
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

    @property
    def in_codes(self) -> bool:
        """Whether the second moment has one scale, known before the pass, which then works in units of its codes."""
        return has_scale(self.exp_avg_sq, self.exp_avg_sq_block)


class Scalars(NamedTuple):
    """What changes from step to step, FP32 on the device: 0-d here, columns [parameters] where they are computed.

    A scale is that of the tensor, or 1 where it has none or one for each block: blocks are unscaled before, and scaled after.
    """

    grad_decay: Tensor
    """Weight decay in units of the gradient's codes, of Adam."""
    exp_avg_decay: Tensor
    """β1/k_m."""
    exp_avg_gain: Tensor
    """(1-β1)/k_g, negative to maximize."""
    exp_avg_scale: Tensor
    exp_avg_sq_decay: Tensor
    """β2·s²/k², or β2·s/k without the root."""
    exp_avg_sq_gain: Tensor
    """√(1-β2)·s/k_g, or √((1-β2)·s)/k_g without the root."""
    root_factor: Tensor
    """b2/(b1·s), or b2/(b1·√s) without the root."""
    eps: Tensor
    """max(ε/b1, 2^-126)."""
    ratio_bound: Tensor
    param_decay: Tensor
    """Weight decay over the scale of the parameter's codes, of AdamW."""
    param_rescale: Tensor
    """s_p/k_p."""
    minus_rate: Tensor
    """-lr·s_p."""


def has_scale(fmt: Format, block: int | None = None) -> bool:
    """Whether a tensor in this format carries one scale: neither blocks of them, nor a range as wide as that of FP32."""
    return block is None and fmt.min_exponent > FP32.min_exponent


class Operands(NamedTuple):
    """The tensors of one parameter of n elements, contiguous, of any shape."""

    param: Tensor
    """Codes of the format, as are the moments."""
    grad: Tensor
    """FP32, BF16, FP16 or E4M3."""
    residual: Tensor | None
    """int8, the low bytes of an E4M11 gradient."""
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
    param, grad, exp_avg, exp_avg_sq = (tensor.view(-1) for tensor in (param, grad, exp_avg, exp_avg_sq))
    residual = None if residual is None else residual.view(-1)

    def load(codes: Tensor, factor: Tensor | None, scales: Tensor | None, block: int | None, start: int) -> Tensor:
        """codes · (factor / scale)"""
        codes = codes[start : start + CHUNK].float()
        if scales is None or block is None:
            return codes if factor is None else codes * factor
        scales = scales[start // block : (start + CHUNK) // block]
        return multiply(codes, 1 / scales if factor is None else factor / scales, block)

    def store(
        x: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        block: int | None,
        start: int,
        word: Tensor | None,
    ) -> Tensor:
        fmt = Format.of(codes.dtype)
        if scales is not None and block is not None:
            scale = scale_from_amax(amax(x, block=block), fmt.max)
            scales[start // block : (start + CHUNK) // block] = scale
            x = multiply(x, scale, block)
        new = round_to(x, fmt, word)
        codes[start : start + CHUNK] = new
        return new

    for start in range(0, param.numel(), CHUNK):
        p = load(param, None, None, None, start)
        g = _gradient(grad, residual, start)
        if not formats.decoupled:
            g = g + s.grad_decay * p
        m = load(exp_avg, s.exp_avg_decay, exp_avg_scales, formats.exp_avg_block, start)
        m = m + s.exp_avg_gain * g
        u = load(exp_avg_sq, None, exp_avg_sq_scales, formats.exp_avg_sq_block, start)
        if formats.sqrt_exp_avg_sq:
            u = u * u
        g = s.exp_avg_sq_gain * g
        u = s.exp_avg_sq_decay * u + g * g
        # IEEE: the FP32 square root of torch is not correctly rounded on every CPU
        root = (u.clamp(min=SMALLEST_SQUARE) if formats.in_codes else u).double().sqrt().float()
        ratio = m * (1 / (root * s.root_factor + s.eps))
        ratio = ratio.clamp(-s.ratio_bound, s.ratio_bound)
        if formats.decoupled:
            ratio = ratio + s.param_decay * p
        p = s.param_rescale * p + s.minus_rate * ratio

        words: list[Tensor | None] = [None, None, None]
        if formats.stochastic:
            words = [*random_top_bits(key, offset + start, p.numel(), p.device, MULTIPLIERS)]
        if formats.exp_avg_block is None:
            m = m * s.exp_avg_scale
        second = root if formats.sqrt_exp_avg_sq else u
        new = (
            store(p, param, None, None, start, words[0]),
            store(m, exp_avg, exp_avg_scales, formats.exp_avg_block, start, words[1]),
            store(second, exp_avg_sq, exp_avg_sq_scales, formats.exp_avg_sq_block, start, words[2]),
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


def _gradient(grad: Tensor, residual: Tensor | None, start: int) -> Tensor:
    grad = grad[start : start + CHUNK]
    if residual is None:
        return grad.float()
    return uncast_residual(grad, residual[start : start + CHUNK], torch.ones((), device=grad.device))
