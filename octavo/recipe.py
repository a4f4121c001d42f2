"""Precision is data: one frozen `Recipe` names the format of every quantity of a training step.

A level of FP8-LM (arXiv 2310.18313), a baseline and each row of its Table 6 is a *value* of this class, never a branch in the
code; a variant is `dataclasses.replace(O2, exp_avg_sq=E4M3)`. Bytes per parameter of a converted layer follow from the formats:
O2 holds 2 (FP16 + scale master) + 1 (FP8 gradient) + 1 (FP8 first moment) + 2 (FP16 second moment) = 6 (Eq. 8), where the usual
mixed precision holds 4 + 4 + 4 + 4 = 16 (Eq. 7).

Three departures from the paper's own table, each because a measurement asked for it (docs/numerics.md): masters and moments are
rounded stochastically, since round-to-nearest FP16 loses most of a fine-tuning-sized update; the second moment is stored as
its square root with blocks of scales on the first moment, since one scale per tensor flushes small values to zero; and updates
are cut to what exact Adam could do. The recipes named `paper…` keep the paper's choices, and store the moments of the embedding
and the head in small formats too, as its code does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from octavo.formats import BF16, E4M3, E5M2, FP16, FP32, Format

FP8 = (E4M3, E5M2)


@dataclass(frozen=True)
class Recipe:
    """The format of every quantity of a training step.

    Raises `ValueError` when the combination cannot work, with the reason.
    """

    name: str
    input: Format | None = E4M3
    """Forward activations in the GEMM, per tensor; None leaves every layer in the user's precision."""
    weight: Format | None = E4M3
    """Weights in the GEMM, per tensor."""
    grad_output: Format | None = E5M2
    """Output gradients in the two backward GEMMs, per tensor."""
    head_grad_output: Format | None = None
    """Output gradients of output heads in their two backward GEMMs, whose forward keeps the compute dtype; None leaves heads alone.
    E5M2 shortens a step by 4 to 7%, and the loss does not see it (docs/numerics.md)."""
    master: Format | None = None
    """Storage of the weights of converted layers, with one scale; None keeps the user's plain parameter."""
    grad: Format | None = E4M3
    """Storage of `p.grad` of converted weights, with one scale; None keeps it plain."""
    exp_avg: Format = FP32
    """Storage of Adam's first moment."""
    exp_avg_sq: Format = FP32
    """Storage of Adam's second moment."""
    moments_of: Literal["converted", "matrices"] = "converted"
    """Whose moments are stored in `exp_avg` and `exp_avg_sq`: those of converted weights, or of all parameters with two dimensions or
    more, embedding and output head included. The moments of all other parameters are FP32."""
    exp_avg_block: int | None = None
    """Elements per scale of the first moment, over the flattened tensor; None is one scale per tensor."""
    exp_avg_sq_block: int | None = None
    """Elements per scale of the second moment, likewise."""
    sqrt_exp_avg_sq: bool = False
    """Store the square root of the second moment: half the exponent range, so FP16 does not flush it."""
    clamp_update: bool = True
    """Cut Adam's update ratio to the bound that it obeys with exact moments; rounded ones exceed it, a flushed second moment by far."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Rounding of masters and moments; operands of GEMMs and gradients are always rounded to nearest."""
    scaling: Literal["current", "delayed"] = "current"
    """Scales of GEMM operands: from the tensor itself, or from a window of past maxima."""
    power_of_two: bool = True
    """Restrict scales to powers of two, which lose no mantissa bits and re-scale exactly."""
    grad_reduce: Literal["two_shot", "nccl", "hierarchical", "bf16", "fp32"] = "two_shot"
    """How gradients are summed over ranks: FP8 with one rounding, FP8 as NCCL sums it, FP8 in two levels, or in BF16 or FP32."""
    grad_scaling: Literal["auto", "pre", "post"] = "auto"
    """What multiplies FP8 gradients before they are summed: µ of Eq. 3, 1/ranks (Eq. 1) or 1 (Eq. 2)."""
    mu_threshold: float = 1e-5
    """Share of values at the largest code above which µ is halved."""
    mu_period: int = 1000
    """Steps in which µ doubles."""

    def __post_init__(self) -> None:
        gemm = (self.input, self.weight, self.grad_output)
        if any(f is None for f in gemm) != all(f is None for f in gemm):
            raise self._error("input, weight and grad_output must be set together, or all be None")
        if any(f is not None and f not in FP8 for f in gemm):
            raise self._error(
                "input, weight and grad_output must be E4M3 or E5M2: the FP8 tensor cores read nothing else"
            )
        if self.input is E5M2 or self.weight is E5M2:
            raise self._error(
                "input and weight must be E4M3: no tensor core multiplies E5M2 by E5M2 in the backward GEMMs"
            )
        if self.input is None and (self.master is not None or self.grad is not None):
            raise self._error(
                "master and grad apply to converted layers, and without an input format none is converted"
            )
        if self.input is None and self.head_grad_output is not None:
            raise self._error("without an input format output heads stay as they are: set head_grad_output=None")
        if self.head_grad_output not in (None, *FP8):
            raise self._error("head_grad_output must be E5M2, E4M3 or None: the FP8 tensor cores read nothing else")
        if self.master is not None and self.master not in (FP16, BF16, E4M3):
            raise self._error(
                "master must be FP16, BF16, E4M3 or None; for an FP32 master keep FP32 parameters and master=None"
            )
        if self.grad is not None and self.grad is not E4M3:
            raise self._error("grad must be E4M3 or None: gradients are stored and summed with three mantissa bits")
        if self.master is not None and self.grad is None:
            raise self._error("a scaled master needs an FP8 gradient: set grad=E4M3")
        for field in ("exp_avg", "exp_avg_sq"):
            block = getattr(self, f"{field}_block")
            if block is not None and (block < 16 or block & (block - 1) or block > 4096):
                raise self._error(f"{field}_block is {block}: use a power of two from 16 to 4096, or None")
            if block is not None and getattr(self, field) in (FP32, BF16):
                raise self._error(
                    f"{field}_block={block} has no meaning for {getattr(self, field).name}, which needs no scale"
                )
        if self.rounding not in ("nearest", "stochastic"):
            raise self._error(f"rounding is {self.rounding!r}: use 'nearest' or 'stochastic'")
        if self.scaling not in ("current", "delayed"):
            raise self._error(f"scaling is {self.scaling!r}: use 'current' or 'delayed'")
        for field in ("moments_of", "grad_reduce", "grad_scaling"):
            choices = get_args(get_type_hints(Recipe)[field])
            if getattr(self, field) not in choices:
                raise self._error(f"{field} is {getattr(self, field)!r}: use one of {', '.join(choices)}")
        if not 0 <= self.mu_threshold < 1 or self.mu_period < 1:
            raise self._error(
                f"mu_threshold={self.mu_threshold} and mu_period={self.mu_period} must be a share in [0, 1) and at least one step"
            )

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"recipe {self.name!r}: {reason}")

    def fuses(self, compiled: bool) -> bool:
        """Whether its layers can run in fused blocks: the compiler cannot trace delayed scaling there."""
        return self.scaling == "current" or not compiled

    @property
    def converts(self) -> bool:
        """Whether layers are converted at all."""
        return self.input is not None


BASELINE = Recipe("bf16", input=None, weight=None, grad_output=None, grad=None)
O1 = Recipe("O1", head_grad_output=E5M2)
O2 = dataclasses.replace(
    O1, name="O2", master=FP16, exp_avg=E4M3, exp_avg_block=128, exp_avg_sq=FP16, sqrt_exp_avg_sq=True
)
PAPER = Recipe(
    "paper", master=FP16, exp_avg=E4M3, exp_avg_sq=FP16, moments_of="matrices", clamp_update=False, rounding="nearest"
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        BASELINE,
        O1,
        O2,
        PAPER,  # Table 6 #2a: the paper's default
        dataclasses.replace(PAPER, name="paper-2b", master=BF16),
        dataclasses.replace(PAPER, name="paper-3", master=E4M3),
        dataclasses.replace(PAPER, name="paper-4", exp_avg_sq=E4M3),
    )
}
"""Recipes by name. Rows FP32 #0 and BF16 #1 of Table 6 differ in the model's compute dtype only; both are `bf16` here."""


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name, or the recipe itself. Raises `ValueError` for an unknown name."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"no recipe is called {recipe!r}; there are {', '.join(RECIPES)}, or pass a Recipe")
    return RECIPES[recipe]
