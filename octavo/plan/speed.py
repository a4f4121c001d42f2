"""How long a step takes at least, from its arithmetic and its bytes and the ceilings of the GPU.

    seconds = Σ GEMMs / rate + attention / rate + element-wise bytes / rate + optimizer's bytes / rate

It is an estimate from below: kernels that reach their ceilings, nothing on the host, no launches. Element-wise work is counted as
passes over the activations, each cast, norm and activation function reading its input and writing its output once where blocks are
compiled, and as octavo's eager operations run where they are not. A real step is some 10 to 25% longer for large models; for models of
a few hundred million parameters launches dominate, and this says little.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.plan.ceilings import Ceiling
from octavo.plan.shapes import Setup


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
    m, n, e, layers = setup.model, setup.tokens * setup.micro_batches, setup.itemsize, setup.model.n_layers
    again = 1 if m.recompute == "full" else 0
    backwards = 2 if setup.release == "two_pass" else 1  # a second backward repeats what is recomputed as well
    again *= backwards
    fp8 = sum(setup.size(name) for name in setup.linears if setup.converted(name))
    plain = sum(setup.size(name) for name in setup.linears if not setup.converted(name))
    seconds: dict[str, float] = {}
    product = 2.0 * n * layers * fp8
    seconds["FP8 GEMMs"] = product * (1 + again) / gpu.fp8_forward + 2 * product * backwards / gpu.fp8_backward
    seconds["BF16 GEMMs"] = (
        2.0 * n * (layers * plain * (1 + again + 2 * backwards) + 3 * setup.head_elements) / gpu.bf16
    )
    scores = 2.0 * n * layers * setup.seq_len * m.attention_width  # two products of half the keys
    extra = backwards if m.recompute == "selective" else again
    seconds["attention"] = (
        scores * (1 + extra) / gpu.attention_forward + 2 * scores * backwards / gpu.attention_backward
    )
    forward, backward = _passes(setup)
    seconds["element-wise"] = n * layers * e * (forward * (1 + again) + backward * backwards) / gpu.elementwise
    seconds["optimizer"] = _optimizer_bytes(setup) / gpu.copy
    casts = 1 if not setup.compiled or not setup.accumulates else setup.micro_batches
    seconds["weight casts"] = layers * fp8 * 6 * casts / gpu.elementwise
    return StepTime({k: v for k, v in seconds.items() if v}, n, n * m.flops_per_token(setup.seq_len))


def _passes(setup: Setup) -> tuple[float, float]:
    """Elements of activations read or written a token and layer in forward and in backward, one pass for each fused operation."""
    m = setup.model
    d, a = m.dim, m.attention_width
    qkv, up, f = setup.linears["qkv"][1], setup.linears["up"][1], m.ffn_width
    # A cast reads its input twice (maximum, cast) and writes one byte for each of two layouts: 3 elements of two bytes.
    cast = 3 if setup.recipe.converts else 0
    forward = 2 * (2 * d) + 2 * (3 * d) + 2 * qkv + up + f + cast * (2 * d + a + f)
    backward = 2 * (4 * d) + 2 * (3 * d) + 2 * qkv + 2 * up + f + cast * (2 * d + qkv + up)
    unfused = 1.0 if setup.compiled else 1.6  # rotation in FP32 pieces, products apart: an estimate
    return unfused * forward, unfused * backward


def _optimizer_bytes(setup: Setup) -> float:
    """Bytes that AdamW reads and writes: gradients once for their norm and once for the update, weights and moments in place."""
    layers = setup.model.n_layers
    total = 0.0
    for name in setup.linears:
        stored = setup.weight_bytes(name) + setup.state_bytes(name)
        total += layers * (2 * stored + 2 * setup.gradient_bytes(name))
    return total + setup.other_parameters * (2 * 12 + 2 * 4)
