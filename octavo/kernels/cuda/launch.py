"""How kernels are launched: on the device that holds the tensors, and with little work on the host.

A small layer is bound by the host: an eager FP8Linear makes about ten launches forward and backward. `kernel[grid](...)` of Triton 3.6
binds, types and hashes all arguments anew each time, about 15 µs on a 3 GHz core. The compiled kernel that it returns can be launched
as it is, in about 3 µs, if its arguments are of the kind that it was compiled for: dtypes, the values of constants, and whether an
integer is 1, a multiple of 16 or beyond 32 bits and an address is a multiple of 16. `Launcher` keeps compiled kernels by a key
that is finer than this kind, the integers themselves, because comparing integers is faster than classifying them and because layers
meet few shapes. The key holds the device too, for a compiled kernel is loaded on one. Addresses go to the launch as integers, so
nobody asks the driver what they are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

MAX_KEYS = 4096
"""Compiled kernels remembered by one launcher; beyond it all are forgotten, and found again in Triton's own cache."""


def on_device(x: Tensor) -> AbstractContextManager:
    """Make the device of `x` current. (Triton's interpreter runs kernels on CPU tensors, which have none to set.)"""
    device = x.get_device()
    return nullcontext() if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)


class Launcher:
    """Launches a Triton kernel whose parameters are pointers, then integers or floats, then constexprs.

    The first pointer is not None. Its dtype and the scalars say all: the dtypes of the other tensors and the number of programs.

    Args:
        kernel: the `triton.jit` function.
        options: of the compiler, as `num_warps`.
    """

    def __init__(self, kernel: Any, **options: int | bool) -> None:
        self.kernel, self.options = kernel, options
        self._launches: dict[tuple[Any, ...], Any] = {}

    def __call__(self, programs: int, tensors: tuple[Tensor | None, ...], *scalars: float | bool) -> None:
        """Launches `programs` programs."""
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(programs, tensors, *scalars)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = (device, first.dtype, scalars, *[None if pointer is None else pointer % 16 for pointer in pointers])
        launch = self._launches.get(key)
        if launch is not None:
            launch(*pointers, *scalars)
            return None
        compiled = self.kernel[(programs,)](*tensors, *scalars, **self.options)
        if compiled is not None:  # None in Triton's interpreter, which compiles nothing
            if len(self._launches) >= MAX_KEYS:
                self._launches.clear()
            self._launches[key] = compiled[(programs, 1, 1)]
        return None
