"""Forward and backward of fused blocks (`octavo.linear.fused`) as a program of allocations; see `octavo.plan.step`.

The functions of a fused block hold what they work on until they return: in backward, the gradients of both weights of the feed-forward
layer, its output gradient in FP8 and all that forward saved are alive together. A compiled region frees each tensor after its last use.
"""

from __future__ import annotations

from octavo.plan.backward import Backward
from octavo.plan.shapes import ATTENTION, FEED_FORWARD, RESIDUAL, WORK, Setup
from octavo.plan.tape import Tape


class Fused(Backward):
    """The whole step, with fused blocks."""

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        self.statistics = (8 if setup.model.dialect == "gpt" else 4) * setup.tokens
        """Bytes of the mean and of one over the deviation of each row, or of the latter alone."""
        self.qkv = self.heads + 2 * self.keys
        self.product_again = self.selective and self.llama

    def block(self, layer: int) -> None:
        """Forward of a block: everything that backward would keep, and the output `x layer+1`."""
        s, t, e, k = self.s, self.t, self.s.itemsize, f"{layer} "
        t.hold(k + "statistics 1", self.statistics, ATTENTION)
        self.codes_of(k + "qkv in", self.codes, ATTENTION)
        self.operand(layer, "qkv")
        t.hold(k + "heads", e * self.qkv, ATTENTION)
        t.drop(k + "qkv in row")
        if s.compiled and self.rotary:  # turned into another tensor
            t.brief(e * self.qkv, ATTENTION)
        t.hold(k + "attended", e * self.heads, ATTENTION)
        t.hold(k + "logsumexp", 4 * s.model.n_heads * s.tokens, ATTENTION)
        if self.selective:
            t.drop(k + "logsumexp")
        self.codes_of(k + "attention out in", self.heads, ATTENTION)
        self.operand(layer, "attention out")
        t.hold("addend", self.stream, WORK)
        t.drop(k + "attention out in row", k + "attended" if self.selective else "")

        t.hold(k + "x 1", self.stream, RESIDUAL)
        t.drop("addend" if s.compiled else "")
        t.hold(k + "statistics 2", self.statistics, FEED_FORWARD)
        self.codes_of(k + "up in", self.codes, FEED_FORWARD)
        self.operand(layer, "up")
        t.hold(k + "up", e * self.up, FEED_FORWARD)
        t.drop(k + "up in row" if s.compiled else "")
        self.codes_of(k + "ffn out in", self.wide, FEED_FORWARD)
        if self.product_again:
            t.drop(k + "ffn out in")
        self.operand(layer, "ffn out")
        if t.alive(f"x {layer + 1}"):
            t.brief(self.stream, WORK)
        else:
            t.hold(f"x {layer + 1}", self.stream, RESIDUAL)
        t.drop(k + "ffn out in row", k + "up in row", "addend")

    def codes_of(self, key: str, count: int, kind: str) -> None:
        """The input of a GEMM of `count` elements: row-major codes for it, transposed ones for backward."""
        self.t.hold(f"{key} row", count, WORK)
        self.t.hold(key, count, kind)

    def block_backward(self, layer: int) -> None:
        if self.again(layer):
            self.block(layer)
            self.t.drop(f"x {layer + 1}")
        self.feed_forward_backward(layer)
        self.attention_backward(layer)

    def cast(self, name: str, count: int) -> None:
        """The gradient `name` of `count` elements in FP8, row-major for dgrad and transposed for wgrad."""
        self.t.hold(f"{name} row", count, WORK)
        self.t.hold(f"{name} col", count, WORK)

    def multiply(self, layer: int, name: str, dy: str, dx: str, count: int) -> None:
        """From the cast `dy`, dgrad into `dx` of `count` elements, for which a compiled region casts the weight again, and wgrad."""
        t, compiled = self.t, self.s.compiled
        if compiled and not t.alive(f"{layer} operand {name}"):
            t.hold("weight again", self.s.operand_bytes(name) / 2, WORK)
        t.hold(dx, self.s.itemsize * count, WORK)
        t.drop("weight again", f"{dy} row" if compiled else "")
        if name == "ffn out" and self.product_again:
            t.hold(f"{layer} {name} in", self.wide, WORK)
        self.make_gradient(layer, name)
        if compiled:
            t.drop(f"{dy} col", f"{layer} {name} in")

    def feed_forward_backward(self, layer: int) -> None:
        t, k, compiled = self.t, f"{layer} ", self.s.compiled
        self.cast("dy", self.codes)
        self.multiply(layer, "ffn out", "dy", "da", self.wide)
        self.cast("dh", self.up)
        t.drop("dy row", "dy col")
        if compiled:
            t.drop("da", k + "up")
        self.multiply(layer, "up", "dh", "dn", self.codes)
        t.brief(self.stream, WORK)  # dx, the new `g`
        t.drop("dn", "da", "dh row", "dh col", k + "up", k + "ffn out in", k + "up in", k + "x 1", k + "statistics 2")
        if not compiled:
            self.collect_gradient(layer, "ffn out")
            self.collect_gradient(layer, "up")

    def attention_backward(self, layer: int) -> None:
        s, t, e, k = self.s, self.t, self.s.itemsize, f"{layer} "
        self.cast("dy", self.codes)
        self.multiply(layer, "attention out", "dy", "da", self.heads)
        t.drop("dy row", "dy col", k + "attention out in")
        if not s.compiled:
            self.collect_gradient(layer, "attention out")
        if self.selective:
            t.hold(k + "attended", e * self.heads, ATTENTION)
        t.hold("d heads", e * self.qkv, WORK)
        t.drop("da", k + "attended", k + "logsumexp", k + "heads")
        if s.recipe.scaling == "delayed":  # otherwise it exists in FP8 only
            t.hold("d qkv", e * self.qkv, WORK)
        self.cast("dy", self.qkv)
        t.drop("d qkv", "d heads" if s.compiled else "")
        self.multiply(layer, "qkv", "dy", "dn", self.codes)
        t.brief(self.stream, WORK)  # dx, the new `g`
        t.drop("dn", "dy row", "dy col", "d heads", k + "qkv in", k + "statistics 1", f"x {layer}")
        for name in s.linears if s.compiled else ("qkv",):
            self.collect_gradient(layer, name)
