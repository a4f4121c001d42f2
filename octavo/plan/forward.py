"""Forward of the blocks and the loss as a program of allocations; see `octavo.plan.step`."""

from __future__ import annotations

from octavo.models.head_gradients import group_tokens
from octavo.models.loss import chunk_tokens
from octavo.plan.shapes import ATTENTION, COPIES, FEED_FORWARD, GRADIENTS, HEAD, RESIDUAL, WORK, Setup
from octavo.plan.tape import Tape

LAST = "ffn out"
"""The last linear layer of a block, whose transposed weight compiled blocks keep if they are not fused."""


class Forward:
    """Forward and loss on a tape."""

    def __init__(self, setup: Setup, tape: Tape) -> None:
        self.s, self.t = setup, tape
        m, n, e = setup.model, setup.tokens, setup.itemsize
        self.stream = e * m.dim * n
        """Bytes of one tensor of the residual stream."""
        self.codes = m.dim * n
        self.selective = m.recompute == "selective"
        self.llama = m.dialect == "llama"
        self.wide, self.up = m.ffn_width * n, setup.linears["up"][1] * n
        self.heads, self.keys = m.attention_width * n, m.kv_heads * m.head_dim * n
        self.rotary = m.positions == "rotary"
        self.one_turn = self.rotary and m.fused
        """Queries and keys are turned in one pass that copies the values: it needs nothing of what the GEMM gave."""
        self.turned = e * (self.heads + (2 if self.one_turn else 1) * self.keys)
        # (On a CPU, RMSNorm keeps FP32 copies of its input and of that normalised.)
        self.plain_rms = self.llama and setup.device == "cpu" and e < 4
        self.cpu_norm = 8 * m.dim * n if self.plain_rms else 0

    def again(self, layer: int) -> bool:
        """Whether backward computes the block again from its input."""
        return layer < self.s.model.recomputed_layers

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
            kept = name == LAST and not s.fused if s.converted(name) else True
            if kept and not self.again(layer):
                self.t.hold(key, size, COPIES)
            else:
                self.t.brief(size, COPIES)
        elif not self.t.alive(key):
            if self.again(layer) and not s.converted(name):  # recomputed with the block
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
            if self.again(layer):
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
            t.hold(k + "rotated", self.turned, ATTENTION)
        if self.one_turn and not self.selective:
            t.drop(k + "heads")
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
        for number in (1, 2):
            t.drop(f"{k}norm {number} input", f"{k}normed {number}", f"{k}statistics {number}")
        for name in ("heads", "rotated", "attended", "logsumexp", "x 1", "up", "silu", "activated"):
            t.drop(k + name)

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
        rows = min(s.tokens, chunk_tokens(vocabulary))
        (self.fp8_chunks if s.fp8_head else self.plain_chunks)(rows)
        t.drop("head weight", "hidden")
        if self.plain_rms:
            t.drop(f"x {s.model.n_layers}")

    def chunks(self, rows: int, gradient: int) -> None:
        """The first chunk of `rows` tokens and the second, for a gradient of that many bytes an element.

        Logits, their FP32 copy and log-probabilities, or, where fused, logits and their gradient. The gradient of the chunk before
        is freed when that of the next takes its name.
        """
        s, t, e, vocabulary = self.s, self.t, self.s.itemsize, self.s.model.padded_vocab_size
        each = vocabulary * (e + gradient if s.compiled else e + (8 if e < 4 else 4))
        t.brief(each * rows, HEAD)
        if s.fp8_head:
            t.hold("stash", vocabulary * self.group(rows), HEAD)
        second = min(rows, s.tokens - rows)
        if second:
            t.brief(gradient * vocabulary * rows + each * second, HEAD)

    def group(self, rows: int) -> int:
        """Tokens of the first group of chunks, which are multiplied as one."""
        return min(self.s.tokens, group_tokens(self.s.model.padded_vocab_size, rows))

    def plain_chunks(self, rows: int) -> None:
        """Both gradients of the head, in the compute dtype."""
        s, t, e = self.s, self.t, self.s.itemsize
        t.hold("head dw", 4 * s.head_elements, HEAD)
        self.chunks(rows, e)
        t.brief(e * rows * s.model.padded_vocab_size + e * s.head_elements, HEAD)

    def fp8_chunks(self, rows: int) -> None:
        """The same in FP8: the transposed weight, the codes of a group of chunks, and, after its last, those of its input and dw."""
        s, t, vocabulary, dw = self.s, self.t, self.s.model.padded_vocab_size, 4 * self.s.head_elements
        t.hold("head codes", s.head_elements, COPIES)
        self.chunks(rows, 1)
        group, last = self.group(rows), self.s.tokens
        if group < s.tokens:  # several: dw is there from the second on
            t.brief(rows * vocabulary + s.model.dim * group + dw, HEAD)
            t.drop("stash")
            last = s.tokens % group or group
            t.hold("head dw", dw, HEAD)
            following = min(group, s.tokens - group)
            t.hold("stash", vocabulary * following, HEAD)
            t.brief((rows + min(rows, following) * (s.itemsize + (1 if s.compiled else 8))) * vocabulary, HEAD)
            t.drop("stash")
            t.hold("stash", vocabulary * last, HEAD)
        t.drop("head codes", "head weight")
        t.brief(s.model.dim * last + dw, HEAD)
        t.drop("stash", "head dw")
        t.hold("head dw", dw, HEAD)
