"""How kernels are launched: on the device that holds the tensors, and with little work on the host.

A small layer is bound by the host: an eager FP8Linear makes about ten launches forward and backward. `kernel[grid](...)` of Triton 3.6
binds, types and hashes all arguments anew each time, about 15 µs on a 3 GHz core before the driver is called. The compiled kernel that it
returns can be launched as it is, in 1 µs (as torch.compile's own launchers do; `compiled[grid](...)` takes 3 for Triton's hooks,
which nobody hears here), if its arguments are of the kind that it was compiled for: dtypes, the values of constants, and whether an
integer is 1, a multiple of 16 or beyond 32 bits and an address is a multiple of 16. `Launcher` keeps compiled kernels by a key
that is finer than this kind, the integers themselves, because comparing integers is faster than classifying them and because layers
meet few shapes. The key holds the device too, for a compiled kernel is loaded on one. Addresses go to the launch as integers, so
nobody asks the driver what they are. Nothing is kept between launches but code, so streams and captured graphs need no care.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

MAX_KEYS = 4096
"""Compiled kernels remembered by one launcher; beyond it all are forgotten, and found again in Triton's own cache."""


def on_device(x: Tensor) -> AbstractContextManager:
    """Make the device of `x` current. (Triton's interpreter runs kernels on CPU tensors, which have none to set.)"""
    device = x.get_device()
    return nullcontext() if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)


class Launcher:
    """Launches a Triton kernel whose parameters are pointers, then integers or floats, then constexprs.

    Args:
        kernel: the `triton.jit` function.
        options: of the compiler, as `num_warps`.
    """

    def __init__(self, kernel: Any, **options: int | bool) -> None:
        self.kernel, self.options = kernel, options
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def __call__(self, programs: int, tensors: tuple[Tensor | None, ...], *scalars: float | bool | None) -> None:
        """Launches `programs` programs on the device of the first tensor, which is not None."""
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(programs, tensors, *scalars)
        pointers: list[int] = []
        kind: list[Any] = [device, scalars]
        bits = 0
        for tensor in tensors:
            if tensor is None:
                pointers.append(0)
                kind.append(None)
            else:
                address = tensor.data_ptr()
                bits |= address
                pointers.append(address)
                kind.append(tensor.dtype)
        if bits % 16:
            kind += [address % 16 for address in pointers]
        key = tuple(kind)
        compiled = self._compiled.get(key)
        if compiled is not None:
            run, function, metadata = compiled
            stream = driver.active.get_current_stream(device)
            run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *scalars)
            return None
        kernel = self.kernel[(programs,)](*tensors, *scalars, **self.options)
        if kernel is not None:  # None in Triton's interpreter, which compiles nothing
            if len(self._compiled) >= MAX_KEYS:
                self._compiled.clear()
            self._compiled[key] = kernel.run, kernel.function, kernel.packed_metadata
        return None
