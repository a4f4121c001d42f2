"""How long a step takes at least, from its arithmetic and its bytes and the ceilings of the GPU.

    seconds = Σ GEMMs / rate + attention / rate + element-wise bytes / rate + optimizer's bytes / rate

It is an estimate from below: kernels that reach their ceilings, nothing on the host, no launches. Element-wise work is counted as
passes over the activations, each cast, norm and activation function reading its input and writing its output once where blocks are
compiled, and as octavo's eager operations run where they are not; in fused blocks, as their kernels read and write. With current
scaling a tensor is taken to be read twice, of which a hint that is right spares one. A real step is some 5 to 25% longer for large models;
for models of a few hundred million parameters launches dominate, and this says little.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.plan.ceilings import Ceiling
from octavo.plan.shapes import Setup

FUSED_SPEED = 1.15
"""Bytes a second of the kernels of fused blocks, in those of a compiled cast: 3.8 TB/s in the profile of a step on an H200."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by what takes them."""

    by_kind: dict[str, float]
    tokens: int
    """Tokens of the step."""
    model_flops: float
    """FLOPs of the model, without those that are repeated."""

    @property
    def seconds(self) -> float:
        return sum(self.by_kind.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """TFLOP/s of the model's own arithmetic."""
        return self.model_flops / self.seconds / 1e12


def step_time(setup: Setup, gpu: Ceiling) -> StepTime:
    """The time of one optimizer step on `gpu`, at its ceilings."""
    m, n, layers = setup.model, setup.tokens * setup.micro_batches, setup.model.n_layers
    again = m.recomputed_layers / layers  # of a forward
    backwards = 2 if setup.release == "two_pass" else 1  # a second backward repeats what is recomputed as well
    again *= backwards
    fp8 = sum(setup.size(name) for name in setup.linears if setup.converted(name))
    plain = sum(setup.size(name) for name in setup.linears if not setup.converted(name))
    seconds: dict[str, float] = {}
    product = 2.0 * n * layers * fp8
    head = 2.0 * n * setup.head_elements
    fp8_backward = 2 * product * backwards + (2 * head if setup.fp8_head else 0)
    seconds["FP8 GEMMs"] = product * (1 + again) / gpu.fp8_forward + fp8_backward / gpu.fp8_backward
    bf16 = 2.0 * n * layers * plain * (1 + again + 2 * backwards) + head * (1 if setup.fp8_head else 3)
    seconds["BF16 GEMMs"] = bf16 / gpu.bf16
    scores = 2.0 * n * layers * setup.seq_len * m.attention_width  # two products of half the keys
    extra = backwards if m.recompute == "selective" else again
    seconds["attention"] = (
        scores * (1 + extra) / gpu.attention_forward + 2 * scores * backwards / gpu.attention_backward
    )
    forward, backward = _fused_bytes(setup) if setup.fused else _bytes(setup)
    rate = gpu.elementwise * (FUSED_SPEED if setup.fused else 1)
    seconds["element-wise"] = n * layers * (forward * (1 + again) + backward * backwards) / rate
    seconds["optimizer"] = _optimizer_bytes(setup) / gpu.copy
    # Both layouts at once, kept for all micro-batches; or, within a graph, each for its GEMM. A gradient is read twice and written, and
    # joins others.
    casts = 6 * setup.micro_batches if setup.compiled or setup.graph else 4
    gradients = 0 if setup.recipe.grad is None else 5 * setup.micro_batches + 8 * (setup.micro_batches - 1)
    seconds["weight casts"] = layers * fp8 * (casts + gradients) / gpu.elementwise
    return StepTime({k: v for k, v in seconds.items() if v}, n, n * m.flops_per_token(setup.seq_len))


def _bytes(setup: Setup) -> tuple[float, float]:
    """Bytes of activations read or written a token and layer in forward and in backward, one pass for each thing that a compiler fuses."""
    m, e = setup.model, setup.itemsize
    d, a = m.dim, m.attention_width
    qkv, up, f = setup.linears["qkv"][1], setup.linears["up"][1], m.ffn_width
    # A cast reads its input twice (maximum, cast) and writes one byte for each of two layouts: 3 elements of two bytes.
    cast = 3 if setup.recipe.converts else 0
    forward = 2 * (2 * d) + 2 * (3 * d) + 2 * qkv + up + f + cast * (2 * d + a + f)
    backward = 2 * (4 * d) + 2 * (3 * d) + 2 * qkv + 2 * up + f + cast * (2 * d + qkv + up)
    unfused = 1.0 if setup.compiled else 1.6  # rotation in FP32 pieces, products apart: an estimate
    return unfused * e * forward, unfused * e * backward


def _fused_bytes(setup: Setup) -> tuple[float, float]:
    """The same of blocks through `octavo.linear.fused`; two layouts of codes are 2 bytes."""
    m, e = setup.model, setup.itemsize
    d, a, f = m.dim, m.attention_width, m.ffn_width
    qkv, up = setup.linears["qkv"][1], setup.linears["up"][1]
    turn = m.positions == "rotary"
    forward = e * 4 * d + 2 * (e * d + 2 * d)  # statistics of both norms, the second with a residual sum; their casts
    forward += turn * e * (qkv + a) + (e + 2) * a  # queries and keys in place; the cast of attention's output
    forward += e * up + 2 * f + e * 3 * d  # the activation and its cast; the last sum
    backward = (
        2 * (e + 2) * d + (e + 2) * qkv
    )  # casts of the output gradients, that of the heads as they are turned back
    backward += e * (f + up) + 2 * up + e * 8 * d  # the activation's gradient; those of the norms
    if setup.recipe.scaling == "current":  # a bias has its sum from the pass for the maximum
        forward += e * (a + up)
        backward += e * (f + up + m.ffn_bias * d + m.out_bias * d + qkv)
    else:  # the gradient of the heads is written and read
        backward += e * 2 * qkv
    if m.recompute == "selective" and up > f:
        backward += e * up + f
    return forward, backward


def _optimizer_bytes(setup: Setup) -> float:
    """Bytes that AdamW reads and writes: gradients once for their norm and once for the update, weights and moments in place."""
    layers = setup.model.n_layers
    total = 0.0
    for name in setup.linears:
        stored = setup.weight_bytes(name) + setup.state_bytes(name)
        total += layers * (2 * stored + 2 * setup.gradient_bytes(name))
    return total + setup.other_parameters * (2 * 12 + 2 * 4)
