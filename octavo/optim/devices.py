"""Scalars of a step that have to be on several devices."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(x: Tensor, device: torch.device) -> Tensor:
    """`x` itself if it is on `device` already; else a copy. One to the CPU waits, since the CPU reads it without asking the device."""
    return x.to(device, non_blocking=device.type != "cpu")
