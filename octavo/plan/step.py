"""The training step as a program of allocations: `simulate(setup)` gives its tape.

Written after the code that runs (`octavo.models`, `octavo.linear`, `octavo.optim`), operation by operation where it matters for
the peak; small temporaries that never stand at a peak (rotation of queries and keys, statistics) are left out. What backward
keeps of a block with O2, bytes a token, BF16, d channels, F feed-forward width:

    norms' inputs 2·2d, their FP8 outputs 2·d, q|k|v 6d, rotated q and k 4d, attention's output 2d and its FP8 copy d,
    GPT: GELU's input 2F, its FP8 output F                  31·d at F = 4d
    LLaMA: gate|up 4F, silu(gate) 2F, FP8 product F         37.8·d at F = 8/3·d

Four moments can be the peak: the loss (all activations and a chunk of logits), the start of backward (both copies of the head's
gradient), the last block's backward, and the end of backward, when gradients have taken the place of activations.

Under `torch.compile` the compiler decides what to keep. Its partitioner (torch 2.13) keeps the same, except silu(gate), which it
computes again, and one thing more: a transposed FP8 copy of the last weight of each block. Operands of weights do not stay.
"""

from __future__ import annotations

from octavo.models.loss import CHUNK_ELEMENTS
from octavo.plan.shapes import (
    ATTENTION,
    COPIES,
    FEED_FORWARD,
    GRADIENTS,
    HEAD,
    OTHER,
    RESIDUAL,
    STATES,
    WEIGHTS,
    WORK,
    Setup,
)
from octavo.plan.tape import Tape

LAST = "ffn out"
"""The last linear layer of a block, whose transposed weight compiled blocks keep."""
ACCUMULATE = 10
"""Bytes an element that adding to an FP8 gradient takes for a moment: the sum and the addend in FP32, and new codes."""
CUBLAS = 64 << 20
"""Workspaces of cuBLAS, in the same allocator."""


def simulate(setup: Setup) -> Tape:
    """The tape of one optimizer step in the steady state: the last of its micro-batches, with everything that earlier ones left."""
    tape, step = _begin(setup)
    step.forward()
    step.loss()
    step.backward()
    return tape


def forward_only(setup: Setup) -> Tape:
    """The tape after the forward of all blocks: what backward keeps is alive."""
    tape, step = _begin(setup)
    step.forward()
    return tape


def _begin(setup: Setup) -> tuple[Tape, _Step]:
    tape = Tape()
    resident = setup.resident()
    for kind in (WEIGHTS, OTHER, STATES):
        if kind in resident:
            tape.hold(kind, resident[kind], kind)
    if setup.device == "cuda":
        tape.hold("cublas", CUBLAS, WORK)
    tape.hold("tokens", 16 * setup.tokens, WORK)
    step = _Step(setup, tape)
    if setup.accumulates:
        step.leave_gradients()
    return tape, step


class _Step:
    def __init__(self, setup: Setup, tape: Tape) -> None:
        self.s, self.t = setup, tape
        m, n, e = setup.model, setup.tokens, setup.itemsize
        self.stream = e * m.dim * n
        """Bytes of one tensor of the residual stream."""
        self.codes = m.dim * n
        self.full, self.selective = m.recompute == "full", m.recompute == "selective"
        self.llama = m.dialect == "llama"
        self.wide, self.up = m.ffn_width * n, setup.linears["up"][1] * n
        self.heads, self.keys = m.attention_width * n, m.kv_heads * m.head_dim * n
        self.rotary = m.positions == "rotary"
        # (On a CPU, RMSNorm keeps FP32 copies of its input and of that normalised.)
        self.plain_rms = self.llama and setup.device == "cpu" and e < 4
        self.cpu_norm = 8 * m.dim * n if self.plain_rms else 0

    # --- pieces

    def leave_gradients(self) -> None:
        """What the micro-batches before left: gradients with residuals, and operands of weights for the next."""
        for layer in range(self.s.model.n_layers):
            for name in self.s.linears:
                # (The residual byte comes with the first sum, so in backward of the second micro-batch.)
                summed = self.s.micro_batches > 2 or not self.s.converted(name) or self.s.recipe.grad is None
                size = self.s.gradient_bytes(name) - (0 if summed else self.s.size(name))
                self.t.hold(f"{layer} grad {name}", size, GRADIENTS)
                if not self.s.compiled and self.s.converted(name):
                    self.t.hold(f"{layer} operand {name}", self.s.operand_bytes(name), COPIES)
        self.t.hold("grad head", 4 * self.s.head_elements, GRADIENTS)
        if not self.s.model.tie_embeddings:
            self.t.hold("grad embedding", 4 * self.s.head_elements, GRADIENTS)

    def operand(self, layer: int, name: str) -> None:
        """The weight is cast for the forward GEMM."""
        s, key = self.s, f"{layer} operand {name}"
        if s.compiled:
            size = (1 if s.converted(name) else s.itemsize) * s.size(name) if s.operand_bytes(name) else 0
            kept = name == LAST if s.converted(name) else True
            if kept and not self.full:
                self.t.hold(key, size, COPIES)
            else:
                self.t.brief(size, COPIES)
        elif not self.t.alive(key):
            if self.full and not s.converted(name):  # recomputed with the block
                self.t.brief(s.operand_bytes(name), COPIES)
            else:
                self.t.hold(key, s.operand_bytes(name), COPIES)

    def cast_input(self, key: str, name: str, count: int, kind: str) -> None:
        """The input of a linear layer as it is kept: one FP8 byte an element. (Row-major codes live with their tensor.)"""
        if self.s.converted(name):
            self.t.hold(f"{key} row", count, WORK)
            self.t.hold(key, count, kind)

    # --- forward

    def forward(self) -> None:
        t = self.t
        t.moment = "forward: embedding"
        t.hold("x 0", self.stream, RESIDUAL)
        if self.s.itemsize < 4:
            t.brief(4 * self.codes, RESIDUAL)
        if self.rotary:
            t.hold("rotary", 4 * self.s.seq_len * self.s.model.head_dim, ATTENTION)
        for layer in range(self.s.model.n_layers):
            t.moment = f"forward: block {layer}"
            self.block(layer)
            if self.full:
                self.forget(layer)

    def norm(self, layer: int, number: int, kind: str) -> None:
        if self.plain_rms:
            self.t.hold(f"{layer} norm {number} input", self.cpu_norm, kind)
            self.t.brief(self.cpu_norm / 2, WORK)
        self.t.hold(f"{layer} normed {number}", self.stream, kind)

    def block(self, layer: int) -> None:
        """Forward of a block: everything that backward would keep, and the output `x layer+1`."""
        t, e, k = self.t, self.s.itemsize, f"{layer} "
        plain = not self.s.converted("attention out")
        self.norm(layer, 1, ATTENTION)
        self.cast_input(k + "qkv in", "qkv", self.codes, ATTENTION)
        self.operand(layer, "qkv")
        t.hold(k + "heads", e * (self.heads + 2 * self.keys), ATTENTION)
        if self.rotary:
            t.hold(k + "rotated", e * (self.heads + self.keys), ATTENTION)
        t.hold(k + "attended", e * self.heads, ATTENTION)
        t.hold(k + "logsumexp", 4 * self.s.model.n_heads * self.s.tokens, ATTENTION)
        if self.selective:
            t.drop(k + "rotated", k + "logsumexp")
        self.cast_input(k + "attention out in", "attention out", self.heads, ATTENTION)
        self.operand(layer, "attention out")
        t.hold(k + "x 1", self.stream, RESIDUAL)
        t.brief(self.stream, WORK)
        t.drop(k + "qkv in row", k + "attention out in row")
        if not plain:
            t.drop(k + "normed 1")
            if self.selective:
                t.drop(k + "attended")
        if self.plain_rms:
            t.drop(f"x {layer}")

        self.norm(layer, 2, FEED_FORWARD)
        self.cast_input(k + "up in", "up", self.codes, FEED_FORWARD)
        self.operand(layer, "up")
        t.hold(k + "up", e * self.up, FEED_FORWARD)
        if self.llama:
            t.hold(k + "silu", e * self.wide, FEED_FORWARD)
        t.hold(k + "activated", e * self.wide, FEED_FORWARD)
        if self.llama and (self.selective or self.s.compiled):
            t.drop(k + "silu")
        self.cast_input(k + "ffn out in", "ffn out", self.wide, FEED_FORWARD)
        self.operand(layer, "ffn out")
        t.hold("y", self.stream, WORK)
        t.drop(k + "ffn out in row", k + "up in row")
        if self.s.converted("ffn out"):
            t.drop(k + "activated")
        if self.s.converted("up"):
            t.drop(k + "normed 2")
        if not t.alive(f"x {layer + 1}"):
            t.hold(f"x {layer + 1}", self.stream, RESIDUAL)
        t.drop("y")
        if self.plain_rms:
            t.drop(k + "x 1")

    def forget(self, layer: int) -> None:
        """Full recomputation keeps the input of a block only."""
        k = f"{layer} "
        t = self.t
        if self.plain_rms and not t.alive(f"x {layer}"):
            t.hold(f"x {layer}", self.stream, RESIDUAL)
        for name in ("qkv", "attention out", "up", "ffn out"):
            t.drop(f"{k}{name} in")
        for name in ("norm 1 input", "norm 2 input", "normed 1", "normed 2", "heads", "rotated", "attended", "logsumexp"):
            t.drop(k + name)
        t.drop(k + "x 1", k + "up", k + "silu", k + "activated")

    # --- head and loss

    def loss(self) -> None:
        s, t, e = self.s, self.t, self.s.itemsize
        vocabulary, elements = s.model.padded_vocab_size, s.head_elements
        t.moment = "the loss"
        if self.plain_rms:
            t.hold("last norm input", self.cpu_norm, RESIDUAL)
            t.brief(self.cpu_norm / 2, WORK)
        t.hold("hidden", self.stream, RESIDUAL)
        if s.itemsize < 4:
            t.hold("head weight", e * elements, COPIES)
        t.hold("head dx", self.stream, HEAD)
        t.hold("head dw", 4 * elements, HEAD)
        rows = min(s.tokens, max(1, CHUNK_ELEMENTS // vocabulary))
        # Logits, their FP32 copy and log-probabilities, or, where fused, logits and their gradient. The gradient of the chunk before
        # is freed when that of the next takes its name.
        each = vocabulary * (2 * e if s.compiled else e + (8 if e < 4 else 4))
        second = min(rows, s.tokens - rows)
        t.brief(each * rows, HEAD)
        if second:
            t.brief(e * vocabulary * rows + each * second, HEAD)
        chunk = rows * vocabulary
        t.brief(e * chunk + e * elements, HEAD)
        t.drop("head weight", "hidden")
        if self.plain_rms:
            t.drop(f"x {s.model.n_layers}")

    # --- backward

    def backward(self) -> None:
        s, t = self.s, self.t
        t.moment = "the start of backward"
        if s.itemsize < 4:
            t.brief(8 * self.codes, WORK)
        t.hold("g", self.stream, RESIDUAL)
        t.hold("new grad head", 4 * s.head_elements, GRADIENTS)
        t.drop("head dx", "head dw")
        self.finish_head()
        self.norm_backward()
        t.drop("last norm input", f"x {s.model.n_layers}")
        for layer in reversed(range(s.model.n_layers)):
            t.moment = f"backward: block {layer}"
            self.block_backward(layer)
        t.moment = "the end of backward"
        t.hold("embedding dx", 4 * self.codes, WORK)
        t.drop("g" if s.itemsize < 4 else "")
        t.hold("new grad embedding", 4 * s.head_elements, GRADIENTS)
        if s.model.tie_embeddings:
            t.brief(4 * s.head_elements, GRADIENTS)
        if t.alive("grad embedding") or s.release != "none" or s.model.tie_embeddings:
            t.drop("new grad embedding")

    def finish_head(self) -> None:
        """The head's gradient joins what waits for it, or is used and freed; a tied one waits for the embedding's."""
        if self.s.model.tie_embeddings:
            return
        if self.t.alive("grad head") or self.s.release != "none":
            self.t.drop("new grad head")

    def norm_backward(self) -> None:
        if self.plain_rms:
            self.t.brief(1.25 * self.cpu_norm, WORK)
        else:
            self.t.brief(self.stream, WORK)

    def weight_gradient(self, layer: int, name: str) -> None:
        """The GEMM's result, its storage form, and what becomes of it."""
        s, t, size = self.s, self.t, self.s.size(name)
        key = f"{layer} grad {name}"
        if not s.converted(name) or s.recipe.grad is None:
            if s.itemsize < 4:
                t.hold("dw", s.itemsize * size, WORK)
            t.hold("new", 4 * size, GRADIENTS)
        elif s.recipe.master is None:  # BF16, then the FP32 of the plain parameter, then FP8
            t.hold("dw", 2 * size, WORK)
            t.brief(4 * size, WORK)
            t.drop("dw")
            t.hold("dw", 4 * size, WORK)
            t.hold("new", size, GRADIENTS)
        else:
            t.hold("dw", 2 * size, WORK)
            t.hold("new", size, GRADIENTS)
        self.drop_operand(layer, name)
        t.drop("dw", "dy operand", f"{layer} {name} in")
        if t.alive(key):
            if s.converted(name) and s.recipe.grad is not None:
                t.brief(ACCUMULATE * size, WORK)
            t.drop("new", key)
            t.hold(key, s.gradient_bytes(name), GRADIENTS)
        else:
            t.drop("new")
            if s.release == "none":
                t.hold(key, s.gradient_bytes(name), GRADIENTS)

    def drop_operand(self, layer: int, name: str) -> None:
        """Freed after the weight's own backward, unless the next micro-batch reads it."""
        if self.s.compiled or not self.s.accumulates or not self.s.converted(name):
            self.t.drop(f"{layer} operand {name}")

    def linear_backward(self, layer: int, name: str, dx: str, count: int, outputs: int, before_wgrad=None) -> None:
        """Cast of the output gradient (row-major and transposed), dgrad into `dx`, wgrad."""
        t = self.t
        if self.s.converted(name):
            t.hold("dy operand", 2 * outputs, WORK)
        if self.s.compiled and self.s.operand_bytes(name):
            t.brief(self.s.size(name) + self.s.itemsize * count, WORK)
        t.hold(dx, self.s.itemsize * count, WORK)
        if before_wgrad is not None:
            before_wgrad()
        self.weight_gradient(layer, name)

    def block_backward(self, layer: int) -> None:
        s, t, e, k = self.s, self.t, self.s.itemsize, f"{layer} "
        again = (lambda: self.block(layer)) if self.full else None
        if self.full and not s.converted("ffn out"):
            # Plain layers unpack their input before they multiply, so the block runs before dx exists.
            self.block(layer)
            again = None
        self.linear_backward(layer, "ffn out", "dh", self.wide, self.codes, again)
        t.drop(f"x {layer + 1}" if layer + 1 < s.model.n_layers and not self.plain_rms else "")
        t.drop(k + "activated")
        if self.llama:
            if not t.alive(k + "silu"):
                t.hold(k + "silu", e * self.wide, FEED_FORWARD)
            t.hold("d silu", e * self.wide, WORK)
            t.hold("d up", e * self.wide, WORK)
            t.drop("dh", k + "silu")
            t.brief(e * self.wide, WORK)
            t.drop(k + "up")
            t.hold("d gate", e * self.wide, WORK)
            t.drop("d silu")
            t.hold("dy", 2 * e * self.wide, WORK)
            t.drop("d gate", "d up")
        else:
            t.hold("dy", e * self.wide, WORK)
            t.drop("dh", k + "up")
        self.linear_backward(layer, "up", "dn", self.codes, self.up)
        t.drop("dy", k + "normed 2")
        self.norm_backward()
        t.drop(k + "norm 2 input", k + "x 1")
        t.hold("dx", self.stream, WORK)
        t.drop("dn", "dx")

        self.linear_backward(layer, "attention out", "da", self.heads, self.codes)
        if self.selective:
            if self.rotary:
                t.hold(k + "rotated", e * (self.heads + self.keys), ATTENTION)
            if not t.alive(k + "attended"):
                t.hold(k + "attended", e * self.heads, ATTENTION)
        t.hold("d heads", e * (self.heads + 2 * self.keys), WORK)
        t.drop("da", k + "rotated", k + "attended", k + "logsumexp", k + "heads")
        # Rotation backward is FP32 inside.
        if self.rotary and not s.compiled:
            t.brief(9 * self.heads if e < 4 else 12 * self.heads, WORK)
        t.brief(e * (self.heads + 2 * self.keys), WORK)
        self.linear_backward(layer, "qkv", "dn", self.codes, self.heads + 2 * self.keys)
        t.drop("d heads", k + "normed 1")
        self.norm_backward()
        t.drop(k + "norm 1 input", "dn")
        if layer == 0 or self.plain_rms:
            t.drop(f"x {layer}")
        t.brief(self.stream, WORK)
