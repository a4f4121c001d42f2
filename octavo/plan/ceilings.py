"""What GPUs can do, as data with conditions: memory and rates.

Memory is what PyTorch reports for the device (139.8 GiB of an H200, 79.1 of an H100 SXM) less 0.6 to 0.8 for context and code.

Rates were measured on 2026-11-29 on one H200 SXM (132 SMs, 60 MB of L2) with torch 2.11.0+cu130, cuDNN 9.19 and Triton 3.6.0, medians,
with 5% of noise: GEMMs on random data at the layer shapes of 7B and 13B and 16,384 tokens, attention at 2,048 x 32 heads x 128 with the
cuDNN backend, element-wise work as a compiled amax and cast counting the bytes that it reads and writes. The H100 SXM has the
same SMs, so the same arithmetic; its bandwidth is scaled by the datasheets, 3.35 to 4.8 TB/s, and has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Ceiling:
    """One GPU."""

    name: str
    capability: str
    """Compute capability."""
    memory: int
    """Bytes that PyTorch's allocator can have."""
    bf16: float
    """BF16 GEMM, FLOP/s."""
    fp8_forward: float
    """E4M3 GEMM into BF16 with fast accumulation, FLOP/s."""
    fp8_backward: float
    """E5M2 by E4M3 GEMM with promoted accumulation, FLOP/s."""
    attention_forward: float
    """Causal attention, counting the half of the scores that the mask leaves, FLOP/s."""
    attention_backward: float
    copy: float
    """Device copy, bytes read and written a second."""
    elementwise: float
    """Compiled amax and cast, bytes a second."""
    measured: str
    """Conditions of the rates."""


_H200 = Ceiling(
    name="H200",
    capability="9.0",
    memory=139 * GIB,
    bf16=676e12,
    fp8_forward=1290e12,
    fp8_backward=1244e12,
    attention_forward=500e12,
    attention_backward=404e12,
    copy=4.26e12,
    elementwise=3.27e12,
    measured="H200 SXM, torch 2.11.0+cu130, cuDNN 9.19, 2026-11-29",
)

GPUS: dict[str, Ceiling] = {
    "h200": _H200,
    "h100": Ceiling(
        name="H100",
        capability="9.0",
        memory=round(78.5 * GIB),
        bf16=_H200.bf16,
        fp8_forward=_H200.fp8_forward,
        fp8_backward=_H200.fp8_backward,
        attention_forward=_H200.attention_forward,
        attention_backward=_H200.attention_backward,
        copy=_H200.copy * 3.35 / 4.8,
        elementwise=_H200.elementwise * 3.35 / 4.8,
        measured="arithmetic as on the H200, bandwidth scaled by the datasheets; not measured",
    ),
}
"""By the name that the command line takes."""
