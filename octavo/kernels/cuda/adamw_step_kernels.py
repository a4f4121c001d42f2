"""The Triton kernels of `octavo.kernels.cuda.adamw_step`, which says what they are for."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from octavo.formats import FP32
from octavo.kernels.cuda.cast import scale_of
from octavo.kernels.cuda.numerics import INTERPRETED, fmix32
from octavo.kernels.reference.adamw import Scalars
from octavo.kernels.reference.adamw_scalars import RATIO_CAP, SLACK
from octavo.kernels.reference.adamw_step import Numbers

WIDTH: tl.constexpr = tl.constexpr(len(Numbers._fields) + 2)
"""Columns of the table of parameters: addresses of the seven tensors of `Numbers`, bucket, row of the results."""
SCALARS: tl.constexpr = tl.constexpr(len(Scalars._fields))
MARGIN: tl.constexpr = tl.constexpr(SLACK)
CAP: tl.constexpr = tl.constexpr(RATIO_CAP)
LARGEST: tl.constexpr = tl.constexpr(FP32.max)
TINY: tl.constexpr = tl.constexpr(FP32.tiny)


@triton.jit
def _number(row_ptr, column: tl.constexpr, valid, other, dtype: tl.constexpr = tl.float32):
    """The numbers [TILE] behind the addresses in a column of rows [TILE]; `other` where there is none."""
    address = tl.load(row_ptr + column, valid, other=0)
    return tl.load(address.to(tl.pointer_type(dtype)), address != 0, other=other)


@triton.jit
def _field(bucket_ptr, column: tl.constexpr, valid):
    """An FP64 setting [TILE] of buckets [TILE]."""
    return tl.load(bucket_ptr + column, valid, other=0).to(tl.float64, bitcast=True)


@triton.jit
def _power(base, t):
    """base^t, FP64, for base >= 0 and t >= 1."""
    if INTERPRETED:
        power = tl.where(base > 0, tl.exp2(t * tl.log2(tl.where(base > 0, base, 1.0))), 0.0)
    else:
        power = libdevice.pow(base, t)
    return power


@triton.jit
def _scale(bound, limit):
    """The scale for values up to `bound` (FP64) of a format up to `limit` (FP64), FP32; 1 if limit is 0."""
    return tl.where(limit > 0, scale_of(bound.to(tl.float32), limit.to(tl.float32), True), 1.0)


@triton.jit
def _store(pointer, value, valid):
    """Store FP64 as FP32, cut to its range."""
    value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    tl.store(pointer, value.to(tl.float32), valid)


@triton.jit(do_not_specialize=["count", "head"])
def _adamw_prepare(
    table_ptr,  # int64: [buckets, FIELDS], then [count, WIDTH]
    scalars_ptr,  # [rows, SCALARS] FP32
    keys_ptr,  # [rows] int32
    scales_ptr,  # [rows, 3] FP32
    maxima_ptr,  # [rows, 3] FP32
    ok_ptr,  # [] uint8
    count,
    head,  # words before the table of parameters
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Scalars, scales, keys, zeros and verdict of `count` parameters, by one program."""
    unusable = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        index = start + tl.arange(0, TILE)
        valid = index < count
        row_ptr = table_ptr + head + index * WIDTH
        bucket_ptr = table_ptr + tl.load(row_ptr + 7, valid, other=0) * FIELDS
        row = tl.load(row_ptr + 8, valid, other=0)
        rate = tl.where(
            tl.load(bucket_ptr + 15, valid, other=0) != 0,
            _number(bucket_ptr, 15, valid, 0.0, tl.float64),
            _field(bucket_ptr, 0, valid),
        )
        beta1 = _field(bucket_ptr, 1, valid)
        rest1 = _field(bucket_ptr, 2, valid)
        beta2 = _field(bucket_ptr, 3, valid)
        rest2 = _field(bucket_ptr, 4, valid)
        weight_decay = _field(bucket_ptr, 6, valid)
        root_rest2 = _field(bucket_ptr, 7, valid)
        rho = _field(bucket_ptr, 9, valid)
        rest_rho = _field(bucket_ptr, 10, valid)
        sq_limit = _field(bucket_ptr, 14, valid)
        flags = tl.load(bucket_ptr + 17, valid, other=0)
        residual = (flags & 1) != 0
        decoupled = (flags & 2) != 0
        square_root = (flags & 4) != 0
        clamp = (flags & 8) != 0

        step = _number(row_ptr, 0, valid, 0.0) + 1.0
        t = step.to(tl.float64)
        word = (tl.load(bucket_ptr + 16, valid, other=0) + step.to(tl.int64)).to(tl.uint32)
        tl.store(keys_ptr + row, fmix32(word).to(tl.int32, bitcast=True), valid)

        unbiased1, unbiased2 = 1.0 - _power(beta1, t), 1.0 - _power(beta2, t)
        terms = tl.where(rest_rho == 0, t, (1.0 - _power(rho, t)) / tl.where(rest_rho == 0, 1.0, rest_rho))
        ratio = _field(bucket_ptr, 8, valid) * tl.sqrt(terms) * tl.sqrt(unbiased2) / unbiased1
        ratio = tl.where(ratio > CAP, CAP, ratio)

        grad_amax = _number(row_ptr, 6, valid, 0.0)
        grad_amax = tl.where(residual, grad_amax * 1.0625 + 0.0009765625, grad_amax)
        grad_scale = _number(row_ptr, 5, valid, 1.0).to(tl.float64)
        grad = grad_amax.to(tl.float64) / grad_scale
        maxima = tl.load(row_ptr + 4, valid, other=0).to(tl.pointer_type(tl.float32))
        param_scale = _number(row_ptr, 1, valid, 1.0).to(tl.float64)
        first_scale = _number(row_ptr, 2, valid, 1.0).to(tl.float64)
        second_scale = _number(row_ptr, 3, valid, 1.0).to(tl.float64)
        param = tl.load(maxima, valid, other=0.0).to(tl.float64) / param_scale
        first = tl.load(maxima + 1, valid, other=0.0).to(tl.float64) / first_scale
        second = tl.load(maxima + 2, valid, other=0.0).to(tl.float64) / second_scale

        grad = tl.where(decoupled, grad, grad + weight_decay * param)
        bound = tl.where(decoupled, param * tl.abs(1.0 - rate * weight_decay), param)
        bound = tl.where(rate == 0, param, (bound + tl.abs(rate) * ratio) * MARGIN)
        first = (beta1 * first + rest1 * grad) * MARGIN
        second = tl.where(square_root, second * second, second)
        second = (beta2 * second + rest2 * (grad * grad)) * MARGIN
        usable = (bound < LARGEST) & (second < LARGEST) & (grad * grad < LARGEST)
        unusable = tl.where(valid & ~usable, 1, unusable)
        second = tl.where(square_root, tl.sqrt(second), second)

        new_param_scale = _scale(bound, _field(bucket_ptr, 12, valid))
        new_first_scale = _scale(first, _field(bucket_ptr, 13, valid))
        new_second_scale = _scale(second, sq_limit)
        for which in tl.static_range(3):
            tl.store(maxima_ptr + row * 3 + which, 0.0, valid)
        tl.store(scales_ptr + row * 3, new_param_scale, valid)
        tl.store(scales_ptr + row * 3 + 1, new_first_scale, valid)
        tl.store(scales_ptr + row * 3 + 2, new_second_scale, valid)

        old_param = 1.0 / param_scale
        grad_factor = 1.0 / grad_scale * _field(bucket_ptr, 11, valid)
        second_factor = 1.0 / second_scale * new_second_scale.to(tl.float64)
        second_factor = tl.where(square_root, second_factor * second_factor, second_factor)
        root_scale = tl.where(square_root, new_second_scale, tl.sqrt_rn(new_second_scale))
        # A product of FP32 where there is a scale, as of a number and an FP32 tensor.
        second_gain = tl.where(sq_limit > 0, (root_rest2.to(tl.float32) * root_scale).to(tl.float64), root_rest2)
        root_scale, unbias1 = root_scale.to(tl.float64), 1.0 / unbiased1
        eps = 1.0 / unbias1 * _field(bucket_ptr, 5, valid)
        decay = weight_decay * old_param
        # In the order of Scalars.
        own_ptr = scalars_ptr + row * SCALARS
        _store(own_ptr, decay / grad_factor, valid)
        _store(own_ptr + 1, beta1 * (1.0 / first_scale), valid)
        _store(own_ptr + 2, rest1 * grad_factor, valid)
        _store(own_ptr + 3, new_first_scale.to(tl.float64), valid)
        _store(own_ptr + 4, beta2 * second_factor, valid)
        _store(own_ptr + 5, second_gain * grad_factor, valid)
        _store(own_ptr + 6, 1.0 / tl.sqrt(unbiased2) / (unbias1 * root_scale), valid)
        _store(own_ptr + 7, tl.where(eps < TINY, TINY, eps), valid)
        tl.store(own_ptr + 8, tl.where(clamp, ratio.to(tl.float32), float("inf")), valid)
        _store(own_ptr + 9, decay, valid)
        _store(own_ptr + 10, old_param * new_param_scale.to(tl.float64), valid)
        _store(
            own_ptr + 11, rate * -1.0 * new_param_scale.to(tl.float64), valid
        )  # (-rate is 0 - rate, which loses a sign)
    tl.store(ok_ptr, (tl.max(unusable, 0) == 0).to(tl.uint8))


@triton.jit(do_not_specialize=["count", "head"])
def _adamw_commit(
    table_ptr,  # as in _adamw_prepare
    scales_ptr,  # [rows, 3] FP32
    maxima_ptr,  # [rows, 3] FP32
    ok_ptr,  # [] uint8
    count,
    head,
    TILE: tl.constexpr,
):
    """Where ok: step += 1, scales = new ones, maxima = new ones."""
    if tl.load(ok_ptr) == 0:
        return
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = index < count
    row_ptr = table_ptr + head + index * WIDTH
    row = tl.load(row_ptr + 8, valid, other=0)
    step_ptr = tl.load(row_ptr, valid, other=0).to(tl.pointer_type(tl.float32))
    tl.store(step_ptr, tl.load(step_ptr, valid, other=0.0) + 1.0, valid)
    kept_ptr = tl.load(row_ptr + 4, valid, other=0).to(tl.pointer_type(tl.float32))
    for which in tl.static_range(3):
        tl.store(kept_ptr + which, tl.load(maxima_ptr + row * 3 + which, valid, other=0.0), valid)
        address = tl.load(row_ptr + 1 + which, valid, other=0)
        scale = tl.load(scales_ptr + row * 3 + which, valid, other=1.0)
        tl.store(address.to(tl.pointer_type(tl.float32)), scale, address != 0)
