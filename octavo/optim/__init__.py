"""Optimizers with precision decoupled, and the clipping of gradients that they read."""

from octavo.optim.adamw import Adam, AdamW
from octavo.optim.clip import clip_grad_norm_

__all__ = ["Adam", "AdamW", "clip_grad_norm_"]
