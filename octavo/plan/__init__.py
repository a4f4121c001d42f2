"""From a config to bytes and time, without running it: what fits on a GPU, when the peak is, how fast a step can be.

| file | what |
|---|---|
| `shapes` | sizes of a run, and the bytes that rest between steps |
| `tape` | allocations in order: bytes alive, the peak, when it was |
| `forward`, `backward`, `fused`, `step` | the training step as a program of allocations, with fused blocks and without |
| `ceilings`, `speed` | GPUs as data, and the time of a step at their ceilings |
| `report` | the plan of a config, what fits, in words |
"""

from octavo.plan.ceilings import GPUS
from octavo.plan.report import Plan, format_plan, largest_micro_batch, make_plan, setup_of
from octavo.plan.shapes import Setup
from octavo.plan.step import simulate

__all__ = ["GPUS", "Plan", "Setup", "format_plan", "largest_micro_batch", "make_plan", "setup_of", "simulate"]
