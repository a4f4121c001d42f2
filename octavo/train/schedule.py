"""The optimizer of a run: learning rate by step, and which parameters decay.

The rate is a function of the step alone, so that a resumed run follows the same curve:

    lr(t) = peak · t / warmup                                                        t ≤ warmup
    lr(t) = peak · (r + (1 - r) · (1 + cos(π · (t - warmup) / (steps - warmup))) / 2)    after it, r = min_lr_ratio
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from octavo.train.config import OptimConfig


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Learning rate of `step`, counted from 1, in a run of `steps`."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = min(1.0, (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: `weight_decay` for parameters of two or more dimensions, none for biases and norm gains."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
