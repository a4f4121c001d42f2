"""The mixture that a training gets: weights as asked, until a source has been seen `max_epochs` times.

From then on the others share its place by their weights, as the stream of training windows does (`octavo.data.mixture`), so for
short trainings the mixture is exactly as asked, and the longer one is, the more it tends to what there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.data.mixture import Mixture
from octavo.prepare.config import SourceConfig


@dataclass(frozen=True)
class Share:
    """One source in a mixture."""

    asked: float
    """Share of the training tokens by the weights."""
    got: float
    """Share of the training tokens under the caps."""
    tokens: int
    """Training tokens that there are."""
    drawn: int
    """Training tokens that are drawn."""
    epochs: float
    """Passes over the source."""
    max_epochs: float


@dataclass(frozen=True)
class MixtureReport:
    """The mixture of a training of `train_tokens` tokens."""

    train_tokens: int
    as_asked_until: int
    """Tokens of training until the first source is used up; up to there the mixture is as asked."""
    most_tokens: int
    """Tokens of training until all sources are used up."""
    shares: dict[str, Share]


def mixture(
    sources: Mapping[str, SourceConfig], tokens: Mapping[str, int], train_tokens: int | None = None
) -> MixtureReport:
    """The mixture of `sources` that have `tokens` training tokens each; the default length is one pass over all of them."""
    limits = {name: int(source.max_epochs * tokens[name]) for name, source in sources.items()}
    plan = Mixture([source.weight for source in sources.values()], list(limits.values()))
    most = plan.total or sum(limits.values())
    length = min(train_tokens or sum(tokens.values()), most)
    weight = sum(source.weight for source in sources.values())
    shares = {
        name: Share(
            asked=source.weight / weight,
            got=drawn / length,
            tokens=tokens[name],
            drawn=drawn,
            epochs=drawn / tokens[name],
            max_epochs=source.max_epochs,
        )
        for (name, source), drawn in zip(sources.items(), plan.counts(length), strict=True)
    }
    first = plan.phases[1].start if len(plan.phases) > 1 else most
    return MixtureReport(length, first, most, shares)
