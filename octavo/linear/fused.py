"""FP8 layers with what surrounds them: a norm before, an activation between, residual sums, each as one autograd function.

    norm_heads      norm(x) · wᵀ + b as queries, keys and values, the first two turned by their positions; and x, for the residual sum
    projection      x · wᵀ + b, which the next adds
    feed_forward    y = s + act(norm(s) · w₁ᵀ + b₁) · w₂ᵀ + b₂, s = x + addend

On their own, norms and activations write BF16 that a cast reads twice, for its maximum and for its codes. Here their kernels write
the codes (`octavo.kernels.norm`, `octavo.kernels.activation`), so that the norm of x, act(h) and the gradient of h exist in FP8 only. In
bytes an element of the GEMM's operand, read and written beside the codes: norm 8 → 4, GELU 8 → 4, its gradient 12 → 8; the last two
are halved again where a hint of the scale is right. The sum of the columns of an output gradient, for a bias, costs nothing
(`kernels.quantize`).

Sums and copies that autograd would make of its own accord join a pass that is there. The gradient of the residual is added where that of
the norm is made: therefore `norm_heads` returns x. The gradients of queries, keys and values, which attention returns one by one, are
turned back into one matrix, without a concatenation (`kernels.rotary_backward`), which with current scaling exists in FP8 only as well
(`kernels.rotary_backward_quantize`): 8 bytes an element, with the codes, become 4, or 6 where no hint is right. Whoever makes the
gradient that the next layer casts knows its largest value. From block to block, unless they are compiled, that value stays on the tensor
(`remember_amax`), which therefore goes on as it is, [..., K]. Within a block it is the gradient of a token, a tensor without a value of its
own that `projection` returns and `feed_forward` takes: `torch.compile` sees such a gradient like any other.

Saved for backward: x, two numbers a row, the transposed codes of both operands and h in the compute dtype, as without fusion. With
`recompute`, the codes of act(h) are made again from h: 1 byte an element for a pass of 3 bytes.

A region between two matrices is one function because a gradient in FP8 cannot pass between two: autograd would want it in the dtype of the
output. Legend as in `octavo.linear.gemm`. With delayed scaling the passes for maxima fall away as well, but `torch.compile` cannot trace
a function that writes to the windows of the past in forward: then the layers run apart. With current scaling it runs the same kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from octavo.linear.feed_forward import FeedForward
from octavo.linear.gemm import Gemms
from octavo.linear.module import FP8Linear
from octavo.linear.regions import Heads, NormHeads, NormSettings, Past, Projection

__all__ = ["Heads", "can_fuse", "feed_forward", "is_customised", "norm_heads", "projection"]

Norm = nn.LayerNorm | nn.RMSNorm


def can_fuse(*modules: nn.Module) -> bool:
    """Whether the functions below do all that a call of these layers and norms would do.

    Layers have to be converted, count nothing at the moment, and scale as this module can; norms to have weights, for one dim. (That
    their classes compute what these are named after is for the caller to know.) Nobody calls a module that is fused, so its hooks would
    not run: none may have any.
    """
    return not is_customised(*modules) and all(map(_fits, modules))


def is_customised(*modules: nn.Module) -> bool:
    """Whether a call of one of `modules` would run hooks, or a `forward` that was put on the object."""
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        for module in modules
    )


def _fits(module: nn.Module) -> bool:
    if isinstance(module, FP8Linear):
        scales = module.recipe.fuses(is_compiling())
        return scales and not module.input_first and module.stats is None
    return isinstance(module, Norm) and module.weight is not None and module.weight.dim() == 1


def norm_heads(
    x: Tensor, norm: Norm, layer: nn.Linear, heads: Heads, table: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries [B, T, H, D], keys and values [B, T, G, D], x) from layer(norm(x)) of x [B, T, K].

    `table` is cos and sin, as in `kernels.rotary`; None turns nothing. The three are parts of one tensor. Whoever reads x beside the
    norm takes the one returned, so that there is one gradient for x.
    """
    tensors = (x, norm.weight, _bias(norm), layer.weight, layer.bias, *(table or (None, None)))
    return NormHeads.apply(*tensors, _settings(norm, x), _gemms(layer, x), _past(layer), heads)


def projection(x: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """(layer(x) of x [M, K], in the dtype of x; a token), both for `feed_forward`, which reads them alone. M is at least 1."""
    return Projection.apply(x, layer.weight, layer.bias, _gemms(layer, x), _past(layer))


def feed_forward(
    x: Tensor,
    norm: Norm,
    up: nn.Linear,
    out: nn.Linear,
    kind: str,
    *,
    addend: tuple[Tensor, Tensor],
    recompute: bool = False,
) -> Tensor:
    """s + out(act(up(norm(s)))) of s = x + addend, in the shape and dtype of x [..., K]. `kind` as in `kernels.activation_cast`.

    There is at least one row; the addend is what `projection` returns, a matrix [M, K] and its token.
    """
    tensors = (x, norm.weight, _bias(norm), up.weight, up.bias, out.weight, out.bias, *addend)
    gemms, past = (_gemms(up, x), _gemms(out, x)), (_past(up), _past(out))
    return FeedForward.apply(*tensors, _settings(norm, x), kind, gemms, past, recompute)


def _bias(norm: Norm) -> Tensor | None:
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def _settings(norm: Norm, x: Tensor) -> NormSettings:
    eps = norm.eps if norm.eps is not None else torch.finfo(x.dtype).eps
    return NormSettings(eps, isinstance(norm, nn.LayerNorm))


def _gemms(layer: nn.Linear, x: Tensor) -> Gemms:
    assert isinstance(layer, FP8Linear)
    if not is_compiling():
        layer.watch_gradient()
    scaling = layer.grad_output_scaling if layer.training else None
    return Gemms(layer.recipe, x.dtype, False, layer.gradient_format is not None, layer.hints, scaling)


def _past(layer: nn.Linear) -> Past:
    assert isinstance(layer, FP8Linear)
    return Past(layer.input_scaling if layer.training else None, torch.is_grad_enabled())
