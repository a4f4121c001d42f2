"""Scalars of an AdamW step, and what the step leaves, in one launch each; equal bit for bit to `octavo.kernels.reference.adamw_step`.

The tensors lie anywhere: a table of their addresses goes to the device, made anew at each step, since gradients move, together with
the settings of each bucket, so that a new learning rate compiles nothing. A thread takes a parameter. `adamw_prepare` is one program,
which also finds the verdict: 128 parameters a turn, each of some hundred FP64 operations, are microseconds.

Sums and products are those of the reference, one after the other (`enable_fp_fusion=False`), in FP64 or FP32 as there. Only powers
are rounded by libdevice, as PyTorch's are on a GPU; nothing of a last bit of FP64 is left in results of FP32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.cuda.adamw_step_kernels import SCALARS, _adamw_commit, _adamw_prepare
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.tables import addresses, upload
from octavo.kernels.reference.adamw import has_scale
from octavo.kernels.reference.adamw_step import Numbers, Prepared, UpdateSettings
from octavo.kernels.reference.random import fmix32

TILE = 128
ALIGN = 4
"""Rows of a bucket begin at multiples of it, so that all its tensors begin at multiples of 16 bytes, which kernels are compiled for."""
FIELDS = 18
"""Words of the settings of a bucket."""
_launch_prepare = Launcher(_adamw_prepare, num_warps=4, enable_fp_fusion=False)
_launch_commit = Launcher(_adamw_commit, num_warps=4, enable_fp_fusion=False)


def adamw_prepare(numbers: Sequence[Sequence[Numbers]], settings: Sequence[UpdateSettings]) -> Prepared:
    """See `octavo.kernels.reference.adamw_step.adamw_prepare`."""
    device = numbers[0][0].step.device
    words: list[int] = []
    kept: list[Tensor] = []
    for one in settings:
        if isinstance(one.lr, Tensor) and one.lr.is_cuda:  # (reading it would wait for it)
            lr = one.lr.to(device, torch.float64, non_blocking=True)
            kept.append(lr)
            words += _bucket_words(one, 0.0, lr.data_ptr())
        else:
            words += _bucket_words(one, float(one.lr), 0)
    spans, count, row = [], 0, 0
    for bucket, own in enumerate(numbers):
        spans.append(slice(row, row + len(own)))
        for number in own:
            words += addresses(number)
            words += (bucket, row)
            row += 1
        count += len(own)
        row = -(-row // ALIGN) * ALIGN
    table = upload(words, device)
    prepared = Prepared(
        torch.empty((row, SCALARS.value), dtype=torch.float32, device=device),
        torch.empty(row, dtype=torch.int32, device=device),
        torch.empty((row, 3), dtype=torch.float32, device=device),
        torch.empty((row, 3), dtype=torch.float32, device=device),
        torch.empty((), dtype=torch.bool, device=device),
        spans,
        table,
    )
    tensors = (table, prepared.scalars, prepared.keys, prepared.scales, prepared.maxima, prepared.ok.view(torch.uint8))
    _launch_prepare(1, tensors, count, len(settings) * FIELDS, TILE, FIELDS)
    return prepared


def adamw_commit(numbers: Sequence[Sequence[Numbers]], prepared: Prepared, ok: Tensor) -> None:
    """See `octavo.kernels.reference.adamw_step.adamw_commit`."""
    assert prepared.table is not None
    count = sum(len(own) for own in numbers)
    tensors = (prepared.table, prepared.scales, prepared.maxima, ok.view(torch.uint8))
    _launch_commit(triton.cdiv(count, TILE), tensors, count, len(prepared.spans) * FIELDS, TILE)


def _bucket_words(settings: UpdateSettings, lr: float, lr_address: int) -> list[int]:
    """The `FIELDS` of a bucket: bits of FP64, but for an address, a hash and flags."""
    beta1, beta2 = settings.betas
    formats = settings.formats
    rho = beta1**2 / max(beta2, 1e-12)
    numbers = (
        lr,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        settings.eps,
        settings.weight_decay,
        math.sqrt(1 - beta2),
        (1 - beta1) / math.sqrt(1 - beta2),
        rho,
        1 - rho,
        -1.0 if settings.maximize else 1.0,
        _limit(formats.param, None) if formats.param_scaled else 0.0,
        _limit(formats.exp_avg, formats.exp_avg_block),
        _limit(formats.exp_avg_sq, formats.exp_avg_sq_block),
    )
    flags = (settings.residual, formats.decoupled, formats.sqrt_exp_avg_sq, formats.clamp_ratio)
    word = sum(flag << bit for bit, flag in enumerate(flags))
    bits = struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))
    return [*bits, lr_address, _seed_word(settings.seed), word]


def _limit(fmt: Format, block: int | None) -> float:
    """The largest value of a format that has one scale, or 0."""
    return fmt.max if has_scale(fmt, block) else 0.0


@lru_cache(maxsize=256)
def _seed_word(seed: int) -> int:
    """What `make_key` adds the step to, for stream 0."""
    word = torch.tensor((seed ^ (seed >> 32)) % 2**32).to(torch.int32)
    return int(fmix32(fmix32(fmix32(word))))
