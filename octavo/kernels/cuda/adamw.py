"""AdamW in one pass, Triton: the twin of `octavo.kernels.reference.adamw`, equal to it bit for bit.

Per element of O2 the pass moves 11 B (codes of p, m and √v both ways, the gradient once): 2.6 ps at 4.26 TB/s. It runs 70
instructions, of which an H200 issues 128 a clock on each of 132 multiprocessors: 2.4 ps at 1.75 GHz. Both together only fit if nothing
waits: there is no branch in the loop, and it loads two tiles ahead; together 2.8 ps were measured (docs/log.md). Hence one hash
an element, no NaN handling (a non-finite value cancels the step), root and reciprocal of normal numbers (`numerics.sqrt_normal`), and
codes rounded as the bits of a float (`numerics.codes_stochastic`). `enable_fp_fusion=False` keeps the bits those of the reference.

One launch updates the whole tiles of many parameters (`octavo.kernels.cuda.tables`), and another the tails of those that have one: only
these need masks, and so loads that are not vectors. A program keeps the maxima of its chunk and issues one atomic for each. A maximum
of non-negative floats is one of their bits as integers, so the result does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.cuda.adamw_tiles import (
    load_tile,
    random_words,
    round_codes,
    scale_blocks,
    store_maximum,
    store_tile,
    unscale_blocks,
)
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import merge_e4m11, reciprocal_normal, sqrt_normal
from octavo.kernels.cuda.tables import TRITON_DTYPES, addresses, aligned, chunk_table, pointer, tail_table, upload
from octavo.kernels.reference.adamw import MULTIPLIERS, SMALLEST_SQUARE, Operands, Scalars, UpdateFormats

TILE = 1024
"""Elements per tile, or one block of scales if that is longer: 8 a thread of 4 warps."""
CHUNK = 16 * TILE
"""Elements of a program."""
SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SQUARE)
FIRST: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
SECOND: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
THIRD: tl.constexpr = tl.constexpr(MULTIPLIERS[2])
WIDTH: tl.constexpr = tl.constexpr(9)
"""Columns of the pointer table: seven pointers, numel, offset."""


def adamw(
    operands: Sequence[Operands], scalars: Tensor, keys: Tensor, ok: Tensor, amaxes: Tensor, formats: UpdateFormats
) -> None:
    """See `octavo.kernels.reference.adamw.adamw`."""
    tile = max(TILE, formats.exp_avg_block or 0, formats.exp_avg_sq_block or 0)
    chunk = max(CHUNK, tile)
    alike: dict[tuple, tuple[list[int], list[int], list[int]]] = {}
    for row, one in enumerate(operands):
        places = addresses(one[:7])
        numel = one.param.numel()
        kind = one.grad.dtype, one.offset + numel > 2**32, aligned(places)
        rows, sizes, words = alike.setdefault(kind, ([], [], []))
        rows.append(row)
        sizes.append(numel)
        words += places
        words += (numel, one.offset)
    device, residual = ok.device, operands[0].residual is not None
    for (grad_dtype, wide, all_aligned), (rows, sizes, words) in alike.items():
        table, numels = upload(words, device), tuple(sizes)
        numbers = None if len(rows) == len(operands) else upload(rows, device)
        own = (scalars, keys, amaxes) if numbers is None else (scalars[numbers], keys[numbers], amaxes[numbers])
        tables = chunk_table(numels, tile, device, chunk), tail_table(numels, tile, device)
        for masked, chunks in enumerate(tables):
            if len(chunks):
                _launcher(tile // 256)(
                    len(chunks),
                    (table, chunks, *own[:2], ok.view(torch.uint8), own[2].view(torch.int32)),
                    TRITON_DTYPES[formats.param.dtype],
                    TRITON_DTYPES[grad_dtype],
                    TRITON_DTYPES[formats.exp_avg.dtype],
                    TRITON_DTYPES[formats.exp_avg_sq.dtype],
                    residual,
                    *_constants(formats.param),
                    *_constants(formats.exp_avg),
                    *_constants(formats.exp_avg_sq),
                    formats.exp_avg_block,
                    formats.exp_avg_sq_block,
                    formats.sqrt_exp_avg_sq,
                    formats.in_codes,
                    formats.stochastic,
                    formats.decoupled,
                    wide,
                    all_aligned,
                    len(Scalars._fields),
                    tile,
                    tile if masked else chunk,
                    bool(masked),
                )
        if numbers is not None:
            amaxes[numbers] = own[2]


@cache
def _launcher(warps: int) -> Any:
    return Launcher(_adamw, num_warps=warps, enable_fp_fusion=False)


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
    IN_CODES: tl.constexpr,
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
    grad_decay = tl.load(scalars_ptr)
    exp_avg_decay = tl.load(scalars_ptr + 1)
    exp_avg_gain = tl.load(scalars_ptr + 2)
    exp_avg_scale = tl.load(scalars_ptr + 3)
    exp_avg_sq_decay = tl.load(scalars_ptr + 4)
    exp_avg_sq_gain = tl.load(scalars_ptr + 5)
    root_factor = tl.load(scalars_ptr + 6)
    eps = tl.load(scalars_ptr + 7)
    ratio_bound = tl.load(scalars_ptr + 8)
    param_decay = tl.load(scalars_ptr + 9)
    param_rescale = tl.load(scalars_ptr + 10)
    minus_rate = tl.load(scalars_ptr + 11)

    param_amax = tl.zeros([TILE], tl.float32)
    exp_avg_amax = tl.zeros([TILE], tl.float32)
    exp_avg_sq_amax = tl.zeros([TILE], tl.float32)
    first = chunk * (CHUNK // TILE)
    tiles = (numel // TILE).to(tl.int32) + (1 if MASKED else 0)
    for tile in tl.range(first, tl.minimum(first + CHUNK // TILE, tiles), num_stages=3):
        start = tile * tl.full([], TILE, tl.int64)
        index = start + tl.arange(0, TILE)
        mask = index < numel

        p = load_tile(param_ptr + index, mask, MASKED).to(tl.float32)
        if RESIDUAL:
            g = merge_e4m11(load_tile(grad_ptr + index, mask, MASKED), load_tile(residual_ptr + index, mask, MASKED))
        else:
            g = load_tile(grad_ptr + index, mask, MASKED).to(tl.float32)
        if not DECOUPLED:
            g = g + grad_decay * p
        m = load_tile(exp_avg_ptr + index, mask, MASKED).to(tl.float32)
        if M_BLOCK is None:
            m = exp_avg_decay * m
        else:
            m = unscale_blocks(m, exp_avg_decay, exp_avg_scales_ptr, start, numel, M_BLOCK, TILE)
        m = m + exp_avg_gain * g
        u = load_tile(exp_avg_sq_ptr + index, mask, MASKED).to(tl.float32)
        if V_BLOCK is not None:
            u = unscale_blocks(u, 1.0, exp_avg_sq_scales_ptr, start, numel, V_BLOCK, TILE)
        if SQRT:
            u = u * u
        g = exp_avg_sq_gain * g
        u = exp_avg_sq_decay * u + g * g
        if IN_CODES:
            root = sqrt_normal(tl.maximum(u, SMALLEST))
        else:
            root = tl.sqrt_rn(u)
        ratio = m * reciprocal_normal(root * root_factor + eps)
        ratio = tl.maximum(tl.minimum(ratio, ratio_bound), -ratio_bound)
        if DECOUPLED:
            ratio = ratio + param_decay * p
        p = param_rescale * p + minus_rate * ratio

        word = tl.arange(0, TILE).to(tl.uint32)
        if STOCHASTIC:
            word = random_words(key, offset + start, TILE, WIDE)
        codes, magnitude = round_codes(
            p, word * FIRST, param_ptr.dtype.element_ty, P_MAX, P_MANTISSA, P_EXPONENT, STOCHASTIC
        )
        store_tile(param_ptr + index, codes, mask, MASKED)
        param_amax = tl.maximum(param_amax, magnitude)

        if M_BLOCK is None:
            m = m * exp_avg_scale
        else:
            m = scale_blocks(m, exp_avg_scales_ptr, start, numel, M_MAX, M_BLOCK, TILE)
        codes, magnitude = round_codes(
            m,
            word * SECOND,
            exp_avg_ptr.dtype.element_ty,
            M_MAX,
            M_MANTISSA,
            M_EXPONENT,
            STOCHASTIC,
            BOUNDED=M_BLOCK is not None,
        )
        store_tile(exp_avg_ptr + index, codes, mask, MASKED)
        if M_BLOCK is None:
            exp_avg_amax = tl.maximum(exp_avg_amax, magnitude)

        second = root if SQRT else u
        if V_BLOCK is not None:
            second = scale_blocks(second, exp_avg_sq_scales_ptr, start, numel, V_MAX, V_BLOCK, TILE)
        codes, magnitude = round_codes(
            second,
            word * THIRD,
            exp_avg_sq_ptr.dtype.element_ty,
            V_MAX,
            V_MANTISSA,
            V_EXPONENT,
            STOCHASTIC,
            SIGNED=False,
            BOUNDED=True,
        )
        store_tile(exp_avg_sq_ptr + index, codes, mask, MASKED)
        if V_BLOCK is None:
            exp_avg_sq_amax = tl.maximum(exp_avg_sq_amax, magnitude)

    store_maximum(amaxes_ptr, param_amax, P_MANTISSA, P_EXPONENT, STOCHASTIC)
    if M_BLOCK is None:
        store_maximum(amaxes_ptr + 1, exp_avg_amax, M_MANTISSA, M_EXPONENT, STOCHASTIC)
    if V_BLOCK is None:
        store_maximum(amaxes_ptr + 2, exp_avg_sq_amax, V_MANTISSA, V_EXPONENT, STOCHASTIC)
