"""The training step as a program of allocations: `simulate(setup)` gives its tape.

Written after the code that runs (`octavo.models`, `octavo.linear`, `octavo.optim`), operation by operation where it matters for
the peak; small temporaries that never stand at a peak (rotation of queries and keys, statistics) are left out. What backward
keeps of a block with O2, bytes a token, BF16, d channels, F feed-forward width:

    norms' inputs 2·2d, their FP8 outputs 2·d, q|k|v 6d, rotated q and k 4d, attention's output 2d and its FP8 copy d,
    GPT: GELU's input 2F, its FP8 output F                  31·d at F = 4d
    LLaMA: gate|up 4F, silu(gate) 2F, FP8 product F         37.7·d at F = 8/3·d

Fused blocks turn queries and keys where they lie and make the product of SwiGLU in one pass: 27·d and 28.3·d, and two numbers a row for
each norm.

Four moments can be the peak: the loss (all activations and a chunk of logits), the start of backward (both copies of the head's
gradient), the last block's backward, and the end of backward, when gradients have taken the place of activations.

Under `torch.compile` the compiler decides what to keep. Its partitioner (torch 2.13) keeps the same, except silu(gate), which it
computes again where blocks are not fused, and there one thing more: a transposed FP8 copy of the last weight of each block. Operands of
weights do not stay.
"""

from __future__ import annotations

from octavo.plan.backward import Backward
from octavo.plan.fused import Fused
from octavo.plan.shapes import ATTENTION, COPIES, FEED_FORWARD, HEAD, OTHER, RESIDUAL, STATES, WEIGHTS, WORK, Setup
from octavo.plan.tape import Tape

CUBLAS = 64 << 20
"""Workspaces of cuBLAS, in the same allocator."""


def simulate(setup: Setup) -> Tape:
    """The tape of one optimizer step in the steady state: the last of its micro-batches, with everything that earlier ones left."""
    tape, step = begin(setup)
    step.forward()
    step.loss()
    if setup.release == "two_pass":  # the first of two backwards frees nothing of what forward kept
        tape.pin(RESIDUAL, ATTENTION, FEED_FORWARD, HEAD, *((COPIES,) if setup.compiled else ()))
    step.backward()
    return tape


def forward_only(setup: Setup) -> Tape:
    """The tape after the forward of all blocks: what backward keeps is alive."""
    tape, step = begin(setup)
    step.forward()
    return tape


def begin(setup: Setup) -> tuple[Tape, Backward]:
    """A tape with what rests between steps and what earlier micro-batches left, and the step that will write on it."""
    tape = Tape()
    resident = setup.resident()
    for kind in (WEIGHTS, OTHER, STATES):
        if kind in resident:
            tape.hold(kind, resident[kind], kind)
    if setup.device == "cuda":
        tape.hold("cublas", CUBLAS, WORK)
    tape.hold("tokens", 16 * setup.tokens, WORK)
    step = (Fused if setup.fused else Backward)(setup, tape)
    if setup.accumulates:
        step.leave_gradients()
    return tape, step
