"""A block of the decoder through the fused functions of `octavo.linear.fused`.

Between the GEMMs of a block there is then one pass over memory where PyTorch makes three to seven, also without `torch.compile`. Parameters
and arithmetic are those of `Block`, but for the parameters of norms, which are read as they are and not in the compute dtype.
"""

from __future__ import annotations

from torch import Tensor

from octavo.linear.fused import can_fuse, feed_forward, norm_linear
from octavo.models.layers import Block, GELUFeedForward, SwiGLUFeedForward


class FusedBlock(Block):
    """`Block`, for layers converted to FP8; it is that block while one of them is not."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        attention, ffn = self.attention, self.ffn
        if isinstance(ffn, GELUFeedForward):
            kind, up, recompute = "gelu", ffn.up, False
        else:
            assert isinstance(ffn, SwiGLUFeedForward)
            kind, up, recompute = "swiglu", ffn.gate_up, ffn.recompute
        if x.numel() == 0 or not can_fuse(attention.qkv, attention.out, up, ffn.out):
            return super().forward(x, cos, sin, mask)
        heads = norm_linear(x.flatten(0, 1), self.attention_norm, attention.qkv)
        heads = heads.view(*x.shape[:2], -1, attention.head_dim)
        x = x + attention.out(attention.attend(heads, cos, sin, mask))
        return feed_forward(x.flatten(0, 1), self.ffn_norm, up, ffn.out, kind, recompute=recompute).view(x.shape)
