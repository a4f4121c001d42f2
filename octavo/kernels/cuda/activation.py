"""GELU and SwiGLU with their cast to FP8, and their gradients, in Triton; see `octavo.kernels.reference.activation`.

Apart, an activation function writes a in BF16 and the cast reads that twice; the gradient likewise. Here a and dh exist as codes only.
Bytes an element of a in BF16, both operands wanted, and the time of 16,384 × 16,384 at 4.2 TB/s:

                              gelu                              swiglu
    activation_amax           h: 2             128 µs           h: 4                256 µs
    activation_cast           h, codes: 4      256 µs           h, codes: 6         383 µs
    activation_backward_amax  da, h: 4         256 µs           da, h: 6            383 µs
    activation_backward_cast  da, h, codes: 6  383 µs           da, h, codes: 10    639 µs

That is 6 and 10 bytes forward, 10 and 16 backward; apart, with each function in one kernel, it is 10 and 12, 12 and 22. With delayed
scaling the second and the last row are all, and with current scaling too where hints of the scales are right, for 2 more instructions
an element (`octavo.kernels.cuda.hints`). Backward reads h and not the codes of a, whose inverse is not unique: GELU falls before it
rises. The bias gradient comes in the same pass, as the sums of each tile's columns in FP32, 1/32 byte an element, which a second step
adds in a fixed order: the same bits in every run, at most (8 + M / 128) · 2^-24 of the column's Σ |dh| from exact.

Matrices of one row or one column take the reference (see `octavo.kernels.cuda.transpose`).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from octavo.formats import Format
from octavo.kernels import reference
from octavo.kernels.cuda.activation_casts import cast_kernel, settle_kernel
from octavo.kernels.cuda.activation_kernels import amax_kernel
from octavo.kernels.cuda.hints import SETTLE_PROGRAMS, WORDS, hintable, new_parts
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.scales import current_scale
from octavo.kernels.cuda.tiles import REPEAT, TILE_K, TILE_M, group_of, rows_of
from octavo.kernels.reference import ALIGN
from octavo.kernels.reference.activation import GATED

AMAX_TILE_M, AMAX_TILE_K = 16, 256
MIN_PROGRAMS, MAX_ROUNDS = 1024, 16
SETTLE_WARPS = 8
SETTLE_REPEAT = REPEAT * 4 // SETTLE_WARPS

_launch_amax = Launcher(amax_kernel, num_warps=8, enable_fp_fusion=False)
# At 96 registers a thread five blocks run on a multiprocessor; the compiler takes a few more. A gated gradient holds twice the values.
_launch_cast = Launcher(cast_kernel, num_warps=4, enable_fp_fusion=False, maxnreg=96)
_launch_gated_cast = Launcher(cast_kernel, num_warps=4, enable_fp_fusion=False)
_launch_settle = Launcher(settle_kernel, num_warps=SETTLE_WARPS, enable_fp_fusion=False, maxnreg=64)


def activation_amax(h: Tensor, kind: str) -> Tensor:
    """See `octavo.kernels.activation_amax`."""
    if 1 in _size(h, GATED[kind]):
        return reference.activation_amax(h, kind)
    return _amax(h, None, GATED[kind])


def activation_backward_amax(da: Tensor, h: Tensor, kind: str) -> Tensor:
    """See `octavo.kernels.activation_backward_amax`."""
    if 1 in da.shape:
        return reference.activation_backward_amax(da, h, kind)
    return _amax(h, da, GATED[kind])


def activation_cast(
    h: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool = True,
    col: bool = True,
    amax: bool = True,
    stats: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """See `octavo.kernels.activation_cast`."""
    if 1 in _size(h, GATED[kind]):
        return reference.activation_cast(h, kind, scale, dtype, row=row, col=col, amax=amax, stats=stats)
    return _cast(h, None, GATED[kind], scale, dtype, row, col, False, amax, stats, None)[:3]


def activation_backward_cast(
    da: Tensor,
    h: Tensor,
    kind: str,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool = True,
    col: bool = True,
    bias_sum: bool = False,
    amax: bool = True,
    stats: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """See `octavo.kernels.activation_backward_cast`."""
    if 1 in da.shape:
        return reference.activation_backward_cast(
            da, h, kind, scale, dtype, row=row, col=col, bias_sum=bias_sum, amax=amax, stats=stats
        )
    return _cast(h, da, GATED[kind], scale, dtype, row, col, bias_sum, amax, stats, None)


def activation_quantize(
    h: Tensor,
    kind: str,
    fmt: Format,
    *,
    da: Tensor | None = None,
    row: bool = True,
    col: bool = True,
    bias_sum: bool = False,
    power_of_two: bool = True,
    hint: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    """See `octavo.kernels.activation_quantize`."""
    gated = GATED[kind]
    size = _size(h, gated)
    if 1 in size:
        return reference.activation_quantize(
            h, kind, fmt, da=da, row=row, col=col, bias_sum=bias_sum, power_of_two=power_of_two
        )
    if not (power_of_two and hintable(h if da is None else da, hint)):
        scale, shown, inverse = current_scale(_amax(h, da, gated), fmt.max, power_of_two)
        codes, codes_t, _, sums = _cast(h, da, gated, scale, fmt.dtype, row, col, bias_sum, False, None, None)
        return codes, codes_t, scale, shown, inverse, sums
    assert hint is not None
    parts = new_parts(h, _tiles(h, da, gated)[2])
    h, da = rows_of(h), None if da is None else rows_of(da)
    codes, codes_t, _, sums = _cast(h, da, gated, hint, fmt.dtype, row, col, bias_sum, False, None, parts)
    (m, width), (tiles_m, tiles_k, tiles, m_padded, k_padded) = size, _tiles(h, da, gated)
    scale, shown, inverse = (torch.empty((), dtype=torch.float32, device=h.device) for _ in range(3))
    _launch_settle(
        min(tiles, SETTLE_PROGRAMS), (h, da, hint, codes, codes_t, parts, scale, shown, inverse),
        m, width, h.stride(0), 0 if da is None else da.stride(0), m_padded, k_padded, tiles_k, tiles, tiles,
        fmt.max, fmt.mantissa_bits, gated, m % TILE_M == 0 and width % TILE_K == 0, group_of(tiles_m),
        SETTLE_REPEAT, TILE_M, TILE_K, WORDS,
    )  # fmt: skip
    return codes, codes_t, scale, shown, inverse, sums


def _amax(h: Tensor, da: Tensor | None, gated: bool) -> Tensor:
    h, (m, width) = rows_of(h), _size(h, gated)
    da = None if da is None else rows_of(da)
    tiles_k = triton.cdiv(width, AMAX_TILE_K)
    # Few programs, for each ends in an atomic on the same address; but enough to fill the device.
    rounds = min(triton.next_power_of_2(m * tiles_k // (AMAX_TILE_M * MIN_PROGRAMS) + 1), MAX_ROUNDS)
    whole = m % (rounds * AMAX_TILE_M) == 0 and width % AMAX_TILE_K == 0
    amax = torch.zeros((), dtype=torch.float32, device=h.device)
    _launch_amax(
        triton.cdiv(m, rounds * AMAX_TILE_M) * tiles_k, (h, da, amax.view(torch.int32)),
        m, width, h.stride(0), 0 if da is None else da.stride(0), tiles_k,
        gated, whole, rounds, AMAX_TILE_M, AMAX_TILE_K,
    )  # fmt: skip
    return amax


def _cast(
    h: Tensor,
    da: Tensor | None,
    gated: bool,
    scale: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    bias_sum: bool,
    amax: bool,
    stats: Tensor | None,
    parts: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """With `parts`, to be filled, the scale is a hint."""
    h, (m, width) = rows_of(h), _size(h, gated)
    da = None if da is None else rows_of(da)
    tiles_m, tiles_k, tiles, m_padded, k_padded = _tiles(h, da, gated)
    codes = torch.empty((m_padded, k_padded), dtype=dtype, device=h.device) if row else None
    codes_t = torch.empty((k_padded, m_padded), dtype=dtype, device=h.device) if col else None
    sums = torch.empty((tiles_m, k_padded), dtype=torch.float32, device=h.device) if bias_sum else None
    maximum = torch.zeros((), dtype=torch.float32, device=h.device) if amax else None
    bits = None if maximum is None else maximum.view(torch.int32)
    fmt = Format.of(dtype)
    launch = _launch_gated_cast if gated else _launch_cast
    launch(
        tiles, (h, da, scale, codes, codes_t, stats, sums, bits, parts),
        m, width, h.stride(0), 0 if da is None else da.stride(0), m_padded, k_padded, tiles_k,
        fmt.max, fmt.mantissa_bits, gated, m % TILE_M == 0 and width % TILE_K == 0, group_of(tiles_m), REPEAT, TILE_M, TILE_K,
    )  # fmt: skip
    return codes, codes_t, maximum, None if sums is None else sums[:, : h.shape[1]].sum(0)


def _tiles(h: Tensor, da: Tensor | None, gated: bool) -> tuple[int, int, int, int, int]:
    """(tiles along M, along F, all of them, rows and columns of the codes)."""
    m, width = _size(h, gated)
    columns = width if da is None else h.shape[1]
    m_padded, k_padded = -(-m // ALIGN) * ALIGN, -(-columns // ALIGN) * ALIGN
    tiles_m, tiles_k = triton.cdiv(m_padded, TILE_M), triton.cdiv(width + k_padded - columns, TILE_K)
    return tiles_m, tiles_k, tiles_m * tiles_k, m_padded, k_padded


def _size(h: Tensor, gated: bool) -> tuple[int, int]:
    """The shape [M, F] of a."""
    return h.shape[0], h.shape[1] // 2 if gated else h.shape[1]
