"""Floors: the time that bytes and operations take at the ceilings of the machine, when everything else costs nothing.

A floor counts what an ideal implementation moves: each tensor that comes from memory once, each that goes there once, no launch, no
tail of a kernel, no synchronisation. Nothing overlaps, although a GPU could copy while it multiplies; a kernel's share
of its floor can therefore exceed 100% by the noise of both measurements, and that of a step by more.
"""

from __future__ import annotations

from octavo.plan.ceilings import Ceiling


def bytes_ms(gbytes: float, ceiling: Ceiling | None) -> float | None:
    """10⁹ bytes read or written, at the rate of a copy."""
    return None if ceiling is None else gbytes * 1e12 / ceiling.copy


def flops_ms(gflops: float, rate: float) -> float:
    """10⁹ operations at `rate` FLOP/s."""
    return gflops * 1e12 / rate


def linear_ms(tokens: int, inputs: int, outputs: int, ceiling: Ceiling | None) -> float | None:
    """FP8Linear forward and backward: three GEMMs, and one pass for each cast with its transpose.

    Casts read x, w, dy (2 B an element) and write both layouts (1 + 1), and the gradient of the weight leaves as E4M3 (2 + 1).
    """
    if ceiling is None:
        return None
    gflops = 2e-9 * tokens * inputs * outputs
    x, w, dy = tokens * inputs, inputs * outputs, tokens * outputs
    casts = bytes_ms(1e-9 * (4 * x + 4 * w + 4 * dy + 3 * w), ceiling)
    assert casts is not None
    return flops_ms(gflops, ceiling.fp8_forward) + flops_ms(2 * gflops, ceiling.fp8_backward) + casts


def plain_linear_ms(tokens: int, inputs: int, outputs: int, ceiling: Ceiling | None) -> float | None:
    """A BF16 layer forward and backward: three GEMMs."""
    return None if ceiling is None else flops_ms(6e-9 * tokens * inputs * outputs, ceiling.bf16)
