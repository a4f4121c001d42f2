"""AdamW in one pass, Triton: the twin of `octavo.kernels.reference.adamw`, equal to it bit for bit.

Per element of O2 the pass moves 11 B (codes of p, m and √v both ways, the gradient once): 2.6 ps at 4.26 TB/s. It runs about 105
instructions, of which an H200 issues 128 a clock on each of 132 multiprocessors, 3.4 ps at 1.85 GHz: it is bound by them, hence one
hash an element, no NaN handling (a non-finite value cancels the step) and one division. Three things keep the bits those of the
reference: no contraction to fused multiply-add (`enable_fp_fusion=False`), `div_rn` and `sqrt_rn`, and arithmetic on the bits of a
float where a rounding or a power of two is meant.

One launch updates the whole tiles of many parameters (`octavo.kernels.cuda.tables`), and another the tails of those that have one: only
these need masks, and so loads that are not vectors. A program keeps the maxima of its chunk and issues one atomic for each. A maximum
of non-negative floats is one of their bits as integers, so the result does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.cuda.launch import on_device
from octavo.kernels.cuda.numerics import GOLDEN, merge_e4m11, mix, random_bits, round_finite_stochastic, rounded_to
from octavo.kernels.cuda.tables import CHUNK, TRITON_DTYPES, aligned, chunk_table, pointer, tail_table, upload
from octavo.kernels.reference.adamw import MULTIPLIERS, SMALLEST_DENOMINATOR, Operands, Scalars, UpdateFormats

TILE = 1024
"""Elements per tile, or one block of scales if that is longer."""
SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_DENOMINATOR)
SECOND: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
THIRD: tl.constexpr = tl.constexpr(MULTIPLIERS[2])
WIDTH: tl.constexpr = tl.constexpr(9)
"""Columns of the pointer table: seven pointers, numel, offset."""


def adamw(
    operands: Sequence[Operands], scalars: Tensor, keys: Tensor, ok: Tensor, amaxes: Tensor, formats: UpdateFormats
) -> None:
    """See `octavo.kernels.reference.adamw.adamw`."""
    tile = max(TILE, formats.exp_avg_block or 0, formats.exp_avg_sq_block or 0)
    alike: dict[tuple, list[int]] = {}
    for row, one in enumerate(operands):
        wide = one.offset + one.param.numel() > 2**32
        alike.setdefault((one.grad.dtype, wide, aligned(one[:7])), []).append(row)
    for (grad_dtype, wide, all_aligned), rows in alike.items():
        tensors = [operands[row] for row in rows]
        device = tensors[0].param.device
        numels = tuple(one.param.numel() for one in tensors)
        pointers = [[0 if t is None else t.data_ptr() for t in one[:7]] for one in tensors]
        table = upload([[*row, n, one.offset] for row, n, one in zip(pointers, numels, tensors, strict=True)], device)
        numbers = None if len(rows) == len(operands) else upload(rows, device)
        own = (scalars, keys, amaxes) if numbers is None else (scalars[numbers], keys[numbers], amaxes[numbers])
        for masked, chunks in enumerate((chunk_table(numels, tile, device), tail_table(numels, tile, device))):
            if len(chunks) == 0:
                continue
            with on_device(table):
                _adamw[(len(chunks),)](
                    table,
                    chunks,
                    own[0],
                    own[1],
                    ok.view(torch.uint8),
                    own[2].view(torch.int32),
                    TRITON_DTYPES[formats.param.dtype],
                    TRITON_DTYPES[grad_dtype],
                    TRITON_DTYPES[formats.exp_avg.dtype],
                    TRITON_DTYPES[formats.exp_avg_sq.dtype],
                    tensors[0].residual is not None,
                    *_constants(formats.param),
                    *_constants(formats.exp_avg),
                    *_constants(formats.exp_avg_sq),
                    formats.exp_avg_block,
                    formats.exp_avg_sq_block,
                    formats.sqrt_exp_avg_sq,
                    formats.stochastic,
                    formats.decoupled,
                    wide,
                    all_aligned,
                    len(Scalars._fields),
                    tile,
                    tile if masked else CHUNK,
                    bool(masked),
                    num_warps=4,
                    enable_fp_fusion=False,
                )
        if numbers is not None:
            amaxes[numbers] = own[2]


def _constants(fmt: Format) -> tuple[float, int, int]:
    return fmt.max, fmt.mantissa_bits, fmt.min_exponent


@triton.jit
def _adamw(
    table_ptr,  # [tensors, WIDTH] int64: addresses of the seven tensors of `Operands`, numel, offset
    chunks_ptr,  # [chunks, 2] int32
    scalars_ptr,  # [tensors, SCALARS] FP32, the fields of Scalars
    keys_ptr,  # [tensors] int32
    ok_ptr,  # [] uint8
    amaxes_ptr,  # [tensors, 3] int32, bits of FP32
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    P_MAX: tl.constexpr,
    P_MANTISSA: tl.constexpr,
    P_EXPONENT: tl.constexpr,
    M_MAX: tl.constexpr,
    M_MANTISSA: tl.constexpr,
    M_EXPONENT: tl.constexpr,
    V_MAX: tl.constexpr,
    V_MANTISSA: tl.constexpr,
    V_EXPONENT: tl.constexpr,
    M_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SQRT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DECOUPLED: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALARS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    if tl.load(ok_ptr) == 0:
        return
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0))
    chunk = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1)
    table_ptr += tensor.to(tl.int64) * WIDTH
    param_ptr = pointer(table_ptr, 0, P_DTYPE, ALIGNED)
    grad_ptr = pointer(table_ptr, 1, G_DTYPE, ALIGNED)
    residual_ptr = pointer(table_ptr, 2, tl.int8, ALIGNED)
    exp_avg_ptr = pointer(table_ptr, 3, M_DTYPE, ALIGNED)
    exp_avg_sq_ptr = pointer(table_ptr, 4, V_DTYPE, ALIGNED)
    exp_avg_scales_ptr = pointer(table_ptr, 5, tl.float32, ALIGNED)
    exp_avg_sq_scales_ptr = pointer(table_ptr, 6, tl.float32, ALIGNED)
    numel = tl.load(table_ptr + 7)
    offset = tl.load(table_ptr + 8)
    key = tl.load(keys_ptr + tensor)
    scalars_ptr += tensor * SCALARS
    amaxes_ptr += tensor * 3
    # In the order of Scalars.
    lr = tl.load(scalars_ptr)
    beta1 = tl.load(scalars_ptr + 1)
    one_minus_beta1 = tl.load(scalars_ptr + 2)
    beta2 = tl.load(scalars_ptr + 3)
    one_minus_beta2 = tl.load(scalars_ptr + 4)
    eps = tl.load(scalars_ptr + 5)
    weight_decay = tl.load(scalars_ptr + 6)
    unbias1 = tl.load(scalars_ptr + 7)
    sqrt_unbias2 = tl.load(scalars_ptr + 8)
    ratio_bound = tl.load(scalars_ptr + 9)
    grad_factor = tl.load(scalars_ptr + 10)
    param_factor = tl.load(scalars_ptr + 11)
    param_scale = tl.load(scalars_ptr + 12)
    exp_avg_factor = tl.load(scalars_ptr + 13)
    exp_avg_scale = tl.load(scalars_ptr + 14)
    exp_avg_sq_factor = tl.load(scalars_ptr + 15)
    exp_avg_sq_scale = tl.load(scalars_ptr + 16)

    param_amax = tl.zeros([TILE], tl.float32)
    exp_avg_amax = tl.zeros([TILE], tl.float32)
    exp_avg_sq_amax = tl.zeros([TILE], tl.float32)
    first = chunk * (CHUNK // TILE)
    tiles = (numel // TILE).to(tl.int32) + (1 if MASKED else 0)
    for tile in range(first, tl.minimum(first + CHUNK // TILE, tiles)):
        start = tile * tl.full([], TILE, tl.int64)
        index = start + tl.arange(0, TILE)
        mask = index < numel

        p = _load(param_ptr + index, mask, MASKED).to(tl.float32) * param_factor
        if RESIDUAL:
            g = merge_e4m11(_load(grad_ptr + index, mask, MASKED), _load(residual_ptr + index, mask, MASKED))
        else:
            g = _load(grad_ptr + index, mask, MASKED).to(tl.float32)
        g = g * grad_factor
        if not DECOUPLED:
            g = g + weight_decay * p
        m = _load(exp_avg_ptr + index, mask, MASKED).to(tl.float32)
        if M_BLOCK is None:
            m = m * exp_avg_factor
        else:
            m = _unscale_blocks(m, exp_avg_scales_ptr, start, numel, M_BLOCK, TILE)
        m = beta1 * m + one_minus_beta1 * g
        v = _load(exp_avg_sq_ptr + index, mask, MASKED).to(tl.float32)
        if V_BLOCK is None:
            v = v * exp_avg_sq_factor
        else:
            v = _unscale_blocks(v, exp_avg_sq_scales_ptr, start, numel, V_BLOCK, TILE)
        if SQRT:
            v = v * v
        v = beta2 * v + one_minus_beta2 * (g * g)
        root = tl.sqrt_rn(v)
        ratio = tl.div_rn(m * unbias1, tl.maximum(root * sqrt_unbias2 + eps, SMALLEST))
        ratio = tl.maximum(tl.minimum(ratio, ratio_bound), -ratio_bound)
        if DECOUPLED:
            ratio = ratio + weight_decay * p
        p = p - (lr * ratio + 0.0)  # an update of -0 would change p = -0

        word = tl.arange(0, TILE)
        if STOCHASTIC:
            word = _random_words(key, offset + start, TILE, WIDE)
        p = tl.maximum(tl.minimum(p * param_scale, P_MAX), -P_MAX)
        p, codes = _round(p, word, param_ptr.dtype.element_ty, P_MANTISSA, P_EXPONENT, STOCHASTIC)
        _store(param_ptr + index, codes, mask, MASKED)
        param_amax = tl.maximum(param_amax, tl.abs(p))

        if M_BLOCK is None:
            m = tl.maximum(tl.minimum(m * exp_avg_scale, M_MAX), -M_MAX)
        else:
            m = _scale_blocks(m, exp_avg_scales_ptr, start, numel, M_MAX, M_BLOCK, TILE)
        m, codes = _round(m, word * SECOND, exp_avg_ptr.dtype.element_ty, M_MANTISSA, M_EXPONENT, STOCHASTIC)
        _store(exp_avg_ptr + index, codes, mask, MASKED)
        if M_BLOCK is None:
            exp_avg_amax = tl.maximum(exp_avg_amax, tl.abs(m))

        second = root if SQRT else v
        if V_BLOCK is None:
            second = tl.minimum(second * exp_avg_sq_scale, V_MAX)
        else:
            second = _scale_blocks(second, exp_avg_sq_scales_ptr, start, numel, V_MAX, V_BLOCK, TILE)
        second, codes = _round(
            second, word * THIRD, exp_avg_sq_ptr.dtype.element_ty, V_MANTISSA, V_EXPONENT, STOCHASTIC, False
        )
        _store(exp_avg_sq_ptr + index, codes, mask, MASKED)
        if V_BLOCK is None:
            exp_avg_sq_amax = tl.maximum(exp_avg_sq_amax, second)

    tl.atomic_max(amaxes_ptr, tl.max(param_amax, 0).to(tl.int32, bitcast=True))
    if M_BLOCK is None:
        tl.atomic_max(amaxes_ptr + 1, tl.max(exp_avg_amax, 0).to(tl.int32, bitcast=True))
    if V_BLOCK is None:
        tl.atomic_max(amaxes_ptr + 2, tl.max(exp_avg_sq_amax, 0).to(tl.int32, bitcast=True))


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask, other=0.0)
    return tl.load(pointer)


@triton.jit
def _store(pointer, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer, value, mask)
    else:
        tl.store(pointer, value)


@triton.jit
def _random_words(key, first, TILE: tl.constexpr, WIDE: tl.constexpr):
    """`numerics.random_bits` of the elements `first` (int64) ... `first` + TILE - 1; WIDE if any of them reaches 2^32."""
    lane = tl.arange(0, TILE)
    if WIDE:
        return random_bits(first + lane, key)
    return mix(lane.to(tl.uint32) * GOLDEN + (first.to(tl.uint32) * GOLDEN + key.to(tl.uint32)))


@triton.jit
def _unscale_blocks(x, scales_ptr, start, numel, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """x / scale, [TILE], with one power-of-two scale for each BLOCK elements."""
    ROWS: tl.constexpr = TILE // BLOCK
    row = start // BLOCK + tl.arange(0, ROWS)
    scales = tl.load(scales_ptr + row, row < tl.cdiv(numel, BLOCK), other=1.0)
    factors = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scales)
    return tl.reshape(tl.reshape(x, [ROWS, BLOCK]) * factors[:, None], [TILE])


@triton.jit
def _scale_blocks(x, scales_ptr, start, numel, MAX: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """x * scale, [TILE], with new scales from the maximum of each BLOCK elements, which are stored."""
    ROWS: tl.constexpr = TILE // BLOCK
    x = tl.reshape(x, [ROWS, BLOCK])
    amax = tl.max(tl.abs(x), 1)
    # As scale_from_amax: 2^floor(log2(MAX / amax)) from exponent and mantissa fields, clamped to [2^-126, 2^126].
    bits = amax.to(tl.int32, bitcast=True)
    max_bits = tl.full([ROWS], MAX, tl.float32).to(tl.int32, bitcast=True)
    exponent = (max_bits >> 23) - (bits >> 23) - tl.where((bits & 0x7FFFFF) > (max_bits & 0x7FFFFF), 1, 0)
    exponent = tl.where(exponent > 126, 126, tl.where(exponent < -126, -126, exponent))
    scales = tl.where(amax > 0, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)
    row = start // BLOCK + tl.arange(0, ROWS)
    tl.store(scales_ptr + row, scales, row < tl.cdiv(numel, BLOCK))
    return tl.reshape(x * scales[:, None], [TILE])


@triton.jit
def _round(
    y,
    word,
    dtype: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr = True,
):
    """(values as FP32, codes) of y, within the range of the format, rounded stochastically by `word` or to nearest."""
    if STOCHASTIC and MANTISSA < 23:
        y = round_finite_stochastic(y, word, MANTISSA, EXPONENT, SIGNED)
        return y, rounded_to(y, dtype)
    codes = rounded_to(y, dtype)
    return codes.to(tl.float32), codes
