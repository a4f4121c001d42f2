"""A block of the decoder through the fused functions of `octavo.linear.fused`.

Between the GEMMs of a block there is then one pass over memory where PyTorch makes three to seven, also without `torch.compile`. Parameters
and arithmetic are those of `Block`, but for the parameters of norms, which are read as they are and not in the compute dtype.

`torch.compile` runs the same kernels: they are opaque to it, and what is left between them is attention and one sum.
"""

from __future__ import annotations

from torch import Tensor

from octavo.linear.fused import Heads, can_fuse, feed_forward, has_hooks, norm_heads, projection
from octavo.models.layers import Block, GELUFeedForward, SwiGLUFeedForward


class FusedBlock(Block):
    """`Block`, for layers converted to FP8; it is that block while one of them is not, or somebody listens inside."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        attention, ffn = self.attention, self.ffn
        if isinstance(ffn, GELUFeedForward):
            kind, up, recompute = "gelu", ffn.up, False
        elif isinstance(ffn, SwiGLUFeedForward):
            kind, up, recompute = "swiglu", ffn.gate_up, ffn.recompute
        else:  # the user's own
            return super().forward(x, cos, sin, mask)
        parts = (self.attention_norm, attention.qkv, attention.out, self.ffn_norm, up, ffn.out)
        if x.numel() == 0 or has_hooks(attention, ffn) or not can_fuse(*parts):
            return super().forward(x, cos, sin, mask)
        heads = Heads(attention.n_heads, attention.kv_heads, attention.head_dim)
        table = (cos, sin) if attention.rotary else None
        q, k, v, x = norm_heads(x, self.attention_norm, attention.qkv, heads, table)
        addend = projection(attention.mix(q, k, v, mask).flatten(0, 1), attention.out)
        return feed_forward(x, self.ffn_norm, up, ffn.out, kind, addend=addend, recompute=recompute)
