"""Backward of the loss and the blocks as a program of allocations; see `octavo.plan.step`."""

from __future__ import annotations

from octavo.plan.forward import Forward
from octavo.plan.shapes import ATTENTION, FEED_FORWARD, GRADIENTS, RESIDUAL, WORK

ACCUMULATE = 6
"""Bytes an element that adding an FP32 gradient to an FP8 one takes for a moment: the sum in FP32, new codes and residual. (FP8
gradients are added in place.)"""


class Backward(Forward):
    """The whole step."""

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
        self.make_gradient(layer, name)
        self.t.drop("dy operand", f"{layer} {name} in")
        self.collect_gradient(layer, name)

    def make_gradient(self, layer: int, name: str) -> None:
        """The GEMM's result and the form in which autograd gets it, with which the operands of the weight have done their work."""
        s, t, size = self.s, self.t, self.s.size(name)
        stored = s.converted(name) and s.recipe.grad is not None
        if stored or s.itemsize < 4:
            t.hold("dw", 2 * size, WORK)
        t.hold(f"new {name}", size if stored and s.recipe.master is not None else 4 * size, GRADIENTS)
        self.drop_operand(layer, name)
        t.drop("dw")

    def collect_gradient(self, layer: int, name: str) -> None:
        """What autograd has becomes the gradient of the parameter, or joins the one that waits there, or is used at once."""
        s, t, size = self.s, self.t, self.s.size(name)
        key, new = f"{layer} grad {name}", f"new {name}"
        stored = s.converted(name) and s.recipe.grad is not None
        if stored and s.recipe.master is None and t.alive(key):
            t.brief(ACCUMULATE * size, WORK)
        elif stored and s.recipe.master is None:  # FP32, as the plain parameter is, until a hook stores it
            t.hold("stored", size, GRADIENTS)
            t.drop(new)
            t.hold(new, size, GRADIENTS)
            t.drop("stored")
        if t.alive(key):
            t.drop(new, key)
            t.hold(key, s.gradient_bytes(name), GRADIENTS)
        else:
            t.drop(new)
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
        again = (lambda: self.block(layer)) if self.again(layer) else None
        if again and not s.converted("ffn out"):
            # Plain layers unpack their input before they multiply, so the block runs before dx exists.
            self.block(layer)
            again = None
        self.linear_backward(layer, "ffn out", "dh", self.wide, self.codes, again)
        last = layer + 1 == s.model.n_layers and not self.again(layer)
        t.drop("" if last or self.plain_rms else f"x {layer + 1}")
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
                t.hold(k + "rotated", self.turned, ATTENTION)
            if not t.alive(k + "attended"):
                t.hold(k + "attended", e * self.heads, ATTENTION)
        t.hold("d heads", e * (self.heads + 2 * self.keys), WORK)
        t.drop("da", k + "rotated", k + "attended", k + "logsumexp", k + "heads")
        # Rotation backward is FP32 inside.
        if self.rotary and not (s.compiled or self.one_turn):
            t.brief(9 * self.heads if e < 4 else 12 * self.heads, WORK)
        t.brief(e * (self.heads + 2 * self.keys), WORK)
        self.linear_backward(layer, "qkv", "dn", self.codes, self.heads + 2 * self.keys)
        t.drop("d heads", k + "normed 1")
        self.norm_backward()
        t.drop(k + "norm 1 input", "dn")
        if layer == 0 or self.plain_rms:
            t.drop(f"x {layer}")
        t.brief(self.stream, WORK)
