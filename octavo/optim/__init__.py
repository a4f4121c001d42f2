"""Optimizers with precision decoupled, and the clipping of gradients that they read."""

from octavo.optim.adamw import Adam, AdamW
from octavo.optim.clip import clip_grad_norm_
from octavo.optim.release import GradientRelease, release_gradients

__all__ = ["Adam", "AdamW", "GradientRelease", "clip_grad_norm_", "release_gradients"]
