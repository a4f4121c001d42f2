"""Floors: the time that bytes and operations take at the ceilings of the machine, when everything else costs nothing.

A floor counts what an ideal implementation moves: each tensor that comes from memory once, each that goes there once, no launch, no
tail of a kernel, no synchronisation. Nothing overlaps, although a GPU could copy while it multiplies; a kernel's share
of its floor can therefore exceed 100% by the noise of both measurements, and that of a step by more.
"""

from __future__ import annotations

from octavo.plan.ceilings import Ceiling
from octavo.plan.shapes import Setup
from octavo.plan.speed import step_time


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


def step_ms(setup: Setup, ceiling: Ceiling) -> dict[str, float]:
    """A training step by kind: what `octavo plan` counts, with the element-wise work of an ideal implementation.

    GEMMs, attention and the optimizer are as in `octavo.plan.speed`. Between the GEMMs of a block there is one pass for each of these, in
    elements of d channels, A of the query heads, Q of queries, keys and values, U of the up projection, F of its activation; two
    layouts of FP8 weigh as much as one element of BF16:

        forward    residual add, norm and cast  2·(3·d + d)      rotation 2·Q      cast of attention's output 2·A      activation U + F
        backward   norm and residual  2·(4·d), their casts 2·d   rotation and cast 2·Q                      activation F + 2·U
    """
    ms = {kind: 1e3 * seconds for kind, seconds in step_time(setup, ceiling).by_kind.items()}
    m = setup.model
    d, a, f = m.dim, m.attention_width, m.ffn_width
    qkv, up = setup.linears["qkv"][1], setup.linears["up"][1]
    forward = 8 * d + 2 * qkv + 2 * a + up + f
    backward = 8 * d + 2 * d + 2 * qkv + f + 2 * up
    again = m.recomputed_layers / m.n_layers  # of a forward
    tokens = setup.tokens * setup.micro_batches
    moved = tokens * m.n_layers * setup.itemsize * ((1 + again) * forward + backward)
    ms["element-wise"] = 1e3 * moved / ceiling.copy
    weights = setup.converted_parameters
    ms["weight casts"] = 1e3 * (4 + 3 * setup.micro_batches) * weights / ceiling.copy
    return {kind: value for kind, value in ms.items() if value}
