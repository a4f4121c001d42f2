"""A block of the decoder through the fused functions of `octavo.linear.fused`.

Between the GEMMs of a block there is then one pass over memory where PyTorch makes three to seven, also without `torch.compile`. Parameters
and arithmetic are those of `Block`, but for the parameters of norms, which are read as they are and not in the compute dtype.

`torch.compile` sees residual sums and cuts of tensors as they are, and joins what it can; eager blocks take functions with them inside.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from octavo.linear.fused import Heads, can_fuse, feed_forward, has_hooks, norm_heads, norm_linear
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
        if not is_compiling():
            table = (cos, sin) if attention.rotary else None
            heads = Heads(attention.n_heads, attention.kv_heads, attention.head_dim, table)
            q, k, v, x = norm_heads(x, self.attention_norm, attention.qkv, heads)
            addend = attention.out(attention.mix(q, k, v, mask).flatten(0, 1))
            return feed_forward(x, self.ffn_norm, up, ffn.out, kind, recompute=recompute, addend=addend)
        qkv = norm_linear(x.flatten(0, 1), self.attention_norm, attention.qkv)
        qkv = qkv.view(*x.shape[:2], -1, attention.head_dim)
        x = x + attention.out(attention.attend(qkv, cos, sin, mask))
        return feed_forward(x.flatten(0, 1), self.ffn_norm, up, ffn.out, kind, recompute=recompute).view(x.shape)
