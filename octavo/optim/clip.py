"""Clipping of gradients by their global norm, FP8 gradients included.

The norm is of real values, in FP64, so no square overflows. A `ScaledTensor` is clipped by its scale alone: its codes are not
touched, nothing is rounded, and a clipped gradient still updates exactly as the unclipped one times the factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from octavo import kernels
from octavo.kernels import known_amax, remember_amax
from octavo.kernels.reference.magnitudes import Values
from octavo.optim.devices import moved
from octavo.tensor import ScaledTensor

CHUNK = 2**22
"""Elements widened to FP64 at a time."""


@torch.no_grad()
def clip_grad_norm_(params: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place; returns their norm before that, FP64, 0-d.

    norm_type is the p of the p-norm, `inf` for the largest magnitude. If the norm is not finite, the gradients stay as they are, so
    that the optimizer skips the step. Raises `ValueError` for a negative `max_norm`. Does not wait for the device.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}: it must not be negative")
    params = [params] if isinstance(params, Tensor) else params
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    device = grads[0].device
    norms = torch.cat([moved(norms, device) for norms in gradient_norms(grads, norm_type)])
    norm = torch.linalg.vector_norm(norms, norm_type)
    factor = clip_factor(norm, max_norm)
    for grad in grads:
        scale_gradient(grad, moved(factor, grad.device), positive=max_norm > 0)
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)), FP32, 0-d; 1 if `norm` (FP64, 0-d) is not finite."""
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0).float()


def scale_gradient(grad: Tensor, factor: Tensor, positive: bool) -> None:
    """grad · factor (FP32, 0-d) in place; a ScaledTensor changes its scale alone if the caller knows that the factor is positive."""
    if isinstance(grad, ScaledTensor) and positive:
        amax = known_amax(grad.codes)
        # (`mul_` has to pass over the codes, as it cannot know that the factor is positive.)
        grad._storage.divide_scale(factor)
        increment_version(grad)
        if amax is not None:
            remember_amax(grad.codes, amax)
    else:
        grad.mul_(factor)


def gradient_norms(grads: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """The norms of gradients, FP64: one 1-d tensor for each device; their order is not that of the gradients."""
    by_device: dict[torch.device, list[tuple[Values, Tensor | None]]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(_parts(grad))
    result = []
    for device, parts in by_device.items():
        values, scales = zip(*parts, strict=True)
        if norm_type == 2:
            amaxes, squares = kernels.magnitudes(values)
            norms = squares.sqrt()
            for (codes, _), scale, amax in zip(values, scales, amaxes.unbind(), strict=True):
                if scale is not None:  # codes outlast the clipping
                    remember_amax(codes, amax)
        else:
            norms = torch.stack([_chunked_norm(codes, residual, norm_type) for codes, residual in values])
        one = torch.ones((), device=device)
        result.append(norms / torch.stack([one if scale is None else scale for scale in scales]).double())
    return result


def _parts(grad: Tensor) -> tuple[Values, Tensor | None]:
    """(values or codes, scale) of a gradient."""
    if not isinstance(grad, ScaledTensor):
        return Values(grad), None
    if grad.block is not None:
        return Values(grad.dequantize(torch.float32)), None
    return Values(grad.codes, grad.residual), grad.scale


def _chunked_norm(values: Tensor, residual: Tensor | None, norm_type: float) -> Tensor:
    one = torch.ones((), device=values.device)
    parts = []
    flat = values.reshape(-1)
    for start in range(0, max(flat.numel(), 1), CHUNK):
        chunk = flat[start : start + CHUNK]
        if values.itemsize == 1 and residual is None:
            chunk = kernels.uncast(chunk, one)
        elif residual is not None:
            chunk = kernels.uncast_residual(chunk, residual.reshape(-1)[start : start + CHUNK], one)
        parts.append(
            torch.linalg.vector_norm(chunk.double(), norm_type)
            if chunk.numel()
            else torch.zeros_like(one, dtype=torch.float64)
        )
    return torch.linalg.vector_norm(torch.stack(parts), norm_type)
