"""Largest magnitudes that are known: of a tensor whose maker had it at hand, and of one that is read many times before it changes.

A cast with a scale of its own reads its tensor twice, for the largest magnitude and for the codes, unless a hint of the scale is right
(`octavo.kernels.quantize`). The first read falls away if the largest magnitude hangs on the tensor itself. It counts as long as the
tensor has the version and the address that it had: autograd, an optimizer or a user that writes to it raises the version. (Writes through
`.data` do not: see `octavo.linear.drop_weight_cache`.) And it counts for the stream that it was found on (`octavo.kernels.streams`).

The replays of a CUDA graph raise no version. So a captured cast takes no maximum that was found outside, where nothing finds it again; but
one found in a graph serves the casts of that graph, and those outside too: the graph wrote it together with its tensor, and each replay
writes both. A tensor that has one keeps no other, of which the next replay would know nothing.

Of intermediate tensors, only eager mode may ask: a compiler writes over memory that it needs no longer without raising a version. Of a
weight a compiled region asks as well, but as it runs and not as it is traced: inside of an opaque operator (`ops_quantize.quantize`),
which gets the very tensor that the layer holds. So nothing of this is an input of a graph, and none is compiled again for it. Likewise
`ops_quantize.cast_current` leaves its maximum on the FP8 gradient that a region returns, for the optimizer.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from octavo.kernels import streams
from octavo.kernels.dispatch import backend


def remember_amax(x: Tensor, amax: Tensor) -> Tensor:
    """`x` with its largest magnitude (FP32, 0-d) on it: whoever made x had it at hand, and a cast need not read x for it.

    A tensor of inference mode has no version, and keeps none.
    """
    if not x.is_inference():
        place, before = streams.place(x), getattr(x, "_octavo_amax", None)
        if place == streams.CAPTURED or before is None or before[2] != streams.CAPTURED:
            x._octavo_amax = (x._version, x.data_ptr(), place, amax)  # type: ignore[attr-defined]
    return x


def known_amax(x: Tensor) -> Tensor | None:
    """What `remember_amax` left on `x`, if x has not changed since (autograd adds gradients in place); None while compiling."""
    if is_compiling():
        return None
    remembered = getattr(x, "_octavo_amax", None)
    if remembered is None or remembered[:2] != (x._version, x.data_ptr()):
        return None
    _, _, place, amax = remembered
    return amax if place in (streams.place(x), streams.CAPTURED) else None


def kept_amax(x: Tensor) -> Tensor | None:
    """`known_amax` of a tensor that is read many times: found now if it is not known, and left on `x`.

    None in inference mode, and while a CUDA graph is captured: its replays could not see that `x` has changed.
    """
    if x.is_inference() or streams.place(x) == streams.CAPTURED:
        return None
    amax = known_amax(x)
    if amax is None:
        amax = backend(x).amax(x.detach())
        remember_amax(x, amax)
    return amax
