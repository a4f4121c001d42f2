"""A block of the decoder through the fused functions of `octavo.linear.fused`.

Between the GEMMs of a block there is then one pass over memory where PyTorch makes three to seven, also without `torch.compile`. Parameters
and arithmetic are those of `Block`, but for the parameters of norms, which are read as they are and not in the compute dtype.

`torch.compile` runs the same kernels: they are opaque to it, and what is left between them is attention and one sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.linear.fused import Heads, can_fuse, feed_forward, is_customised, norm_heads, projection
from octavo.models.layers import Attention, Block, GELUFeedForward, LayerNorm, RMSNorm, SwiGLUFeedForward

NORMS = (LayerNorm, RMSNorm, nn.LayerNorm, nn.RMSNorm)
"""No subclass of the user's, which may compute something else."""


class FusedBlock(Block):
    """`Block`, for layers converted to FP8.

    It runs as `Block` does while one of its layers is not converted, a module in it has a hook or was replaced by one of another class, or
    autocast asks for another dtype than that of the residual stream.
    """

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        attention, ffn = self.attention, self.ffn
        if type(ffn) is GELUFeedForward:
            kind, up, recompute = "gelu", ffn.up, False
        elif type(ffn) is SwiGLUFeedForward:
            kind, up, recompute = "swiglu", ffn.gate_up, ffn.recompute
        else:  # the user's own
            return super().forward(x, cos, sin, mask)
        if not self._fuses(x, up):
            return super().forward(x, cos, sin, mask)
        heads = Heads(attention.n_heads, attention.kv_heads, attention.head_dim)
        table = (cos, sin) if attention.rotary else None
        q, k, v, x = norm_heads(x, self.attention_norm, attention.qkv, heads, table)
        addend = projection(attention.mix(q, k, v, mask).flatten(0, 1), attention.out)
        return feed_forward(x, self.ffn_norm, up, ffn.out, kind, addend=addend, recompute=recompute)

    def _fuses(self, x: Tensor, up: nn.Linear) -> bool:
        """Whether the fused functions do what the modules of this block would do with x; `up` is the first layer of its feed-forward."""
        attention, norms, device = self.attention, (self.attention_norm, self.ffn_norm), x.device.type
        if type(attention) is not Attention or any(type(norm) not in NORMS for norm in norms):
            return False
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype:
            return False
        layers = (attention.qkv, attention.out, up, self.ffn.out)
        return x.numel() > 0 and not is_customised(attention, self.ffn) and can_fuse(*norms, *layers)
