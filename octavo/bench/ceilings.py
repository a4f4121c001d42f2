"""What this machine can do, measured at the start of a run: the floors of everything else are counted in these.

    copy        bytes read and written a second by a device copy far larger than the caches
    bf16        GEMM of two square BF16 matrices
    fp8         E4M3 by E4M3 with fast accumulation (forward), E5M2 by E4M3 with promoted accumulation (backward)
    attention   causal, forward and backward, the fastest backend, counting the half of the scores that the mask leaves

Random data: matrices of zeros draw less power, and the GPU then clocks higher than in training.
"""

from __future__ import annotations

import datetime

import torch
import torch.nn.functional as F

from octavo import kernels
from octavo.bench.timing import measure
from octavo.convert.break_even import capability_of
from octavo.models.layers import best_attention
from octavo.plan.ceilings import Ceiling

COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}
SIDE = {"cuda": 8192, "cpu": 128}
ATTENTION = {"cuda": (8, 32, 2048, 128), "cpu": (1, 2, 64, 16)}
"""Sequences, heads, tokens, channels."""


def measure_ceiling(device: torch.device, repeats: int) -> Ceiling:
    """The ceilings of `device`, seconds of work on a GPU."""
    kind = device.type
    generator = torch.Generator(device).manual_seed(0)

    def seconds(function) -> float:
        return measure(function, device, repeats).ms / 1e3

    copy = _copy(device, repeats)
    side = SIDE[kind]
    a, b = (torch.empty(side, side, device=device).normal_(generator=generator) for _ in range(2))
    scale, flops = torch.ones((), device=device), 2.0 * side**3
    x, w = a.bfloat16(), b.bfloat16()
    bf16 = flops / seconds(lambda: x @ w.t())
    e4m3, e4m3_b, e5m2 = (
        kernels.cast(value, scale, dtype)
        for value, dtype in ((a, torch.float8_e4m3fn), (b, torch.float8_e4m3fn), (a, torch.float8_e5m2))
    )

    def fp8(left: torch.Tensor, fast: bool) -> float:
        return flops / seconds(
            lambda: kernels.scaled_mm_nt(
                left, e4m3_b, scale, scale, torch.bfloat16, fast_accum=fast, inverse_scales=True
            )
        )

    forward, backward = _attention(device, repeats)
    properties = torch.cuda.get_device_properties(device) if kind == "cuda" else None
    return Ceiling(
        name="CPU" if properties is None else properties.name,
        capability=capability_of(device),
        memory=0 if properties is None else properties.total_memory,
        bf16=bf16,
        fp8_forward=fp8(e4m3, fast=True),
        fp8_backward=fp8(e5m2, fast=False),
        attention_forward=forward,
        attention_backward=backward,
        copy=copy,
        elementwise=copy,
        measured=f"here, {datetime.date.today()}",
    )


def _copy(device: torch.device, repeats: int) -> float:
    """Bytes a second, those read and those written."""
    source = torch.randint(256, (COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * source.numel() / measure(lambda: target.copy_(source), device, repeats).ms


def _attention(device: torch.device, repeats: int) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward."""
    batch, heads, tokens, channels = shape = ATTENTION[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)

    def forward() -> torch.Tensor:
        with best_attention(device):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), grad)

    flops = 2.0 * batch * heads * tokens * tokens * channels  # two products of half the keys
    alone, whole = measure(forward, device, repeats).ms / 1e3, measure(both, device, repeats).ms / 1e3
    return flops / alone, 2 * flops / max(whole - alone, 1e-9)


def describe(ceiling: Ceiling) -> str:
    """One line for people."""
    rates = (
        ("BF16", ceiling.bf16),
        ("FP8 forward", ceiling.fp8_forward),
        ("FP8 backward", ceiling.fp8_backward),
        ("attention forward", ceiling.attention_forward),
        ("attention backward", ceiling.attention_backward),
    )
    words = ", ".join(f"{name} {rate / 1e12:.4g} TFLOP/s" for name, rate in rates)
    return f"ceilings: copy {ceiling.copy / 1e9:.4g} GB/s, {words}"
