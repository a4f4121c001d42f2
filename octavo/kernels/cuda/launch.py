"""Where kernels are launched: Triton uses the current device, which need not be the one that holds the tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device(x: Tensor) -> AbstractContextManager:
    """Make the device of `x` current. (Triton's interpreter runs kernels on CPU tensors, which have none to set.)"""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
