"""Which implementation runs: the kernels of `octavo.kernels.cuda` for CUDA tensors, the reference for any other device."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from torch import Tensor

from octavo.kernels import reference


def backend(x: Tensor) -> ModuleType:
    """The module whose functions run on `x`. Triton is imported at the first CUDA tensor, so that CPU needs no Triton."""
    return _cuda() if x.is_cuda else reference


@cache
def _cuda() -> ModuleType:
    """Found once: an import statement takes half a microsecond of each call."""
    from octavo.kernels import cuda

    return cuda
