"""The order of a mixture: shares exact over every stretch, limits kept, any position without the ones before."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from octavo.data.mixture import Mixture


def random_weights(count: int) -> list[float]:
    return [random.choice([0.1, 0.25, 1.0, 3.0, random.random() + 1e-3]) for _ in range(count)]


def in_order(weights: list[float], limits: list[int | None], count: int) -> list[int]:
    """The same sequence by its definition: exact fractions, one window after the other, sources leaving when used up."""
    given, since, taken = [0] * len(weights), [0] * len(weights), []
    active = list(range(len(weights)))
    while len(taken) < count and active:
        source = min(active, key=lambda i: (Fraction(2 * since[i] + 1) / Fraction(weights[i]), i))
        taken.append(source)
        given[source] += 1
        since[source] += 1
        if given[source] == limits[source]:
            active.remove(source)
            since = [0] * len(weights)
    return taken


def test_one_source_is_itself():
    mixture = Mixture([0.3], [None])
    assert mixture.take(5, 4) == [(0, 5), (0, 6), (0, 7), (0, 8)] and mixture.total is None


def test_known_order():
    """Saved runs depend on it."""
    mixture = Mixture([0.5, 0.25, 0.25], [None] * 3)
    assert [source for source, _ in mixture.take(0, 12)] == [0, 1, 2, 0] * 3
    assert [source for source, _ in Mixture([3, 1], [None] * 2).take(0, 8)] == [0, 0, 1, 0] * 2


def test_order_is_that_of_the_definition(seed):
    for _ in range(20):
        count = random.randint(1, 6)
        weights = [2.0 ** random.randint(-4, 4) for _ in range(count)]  # strides without rounding
        limits = [random.choice([None, random.randint(1, 60)]) for _ in range(count)]
        expected = in_order(weights, limits, 400)
        mixture = Mixture(weights, limits)
        assert mixture.total == (None if None in limits else sum(limits))
        assert [source for source, _ in mixture.take(0, len(expected))] == expected


def test_shares_are_exact_over_any_stretch(seed):
    for _ in range(50):
        weights = random_weights(random.randint(1, 9))
        mixture = Mixture(weights, [None] * len(weights))
        shares = [weight / sum(weights) for weight in weights]
        for position in [random.randint(0, 10 ** random.randint(1, 8)) for _ in range(20)]:
            counts = mixture.counts(position)
            assert sum(counts) == position
            for count, share in zip(counts, shares, strict=True):
                assert abs(count - position * share) <= 0.5 + len(weights) * share / 2 + 1e-6 * position * share


def test_any_position_is_known_without_the_ones_before(seed):
    """Counts, and what follows, equal those of one walk; across the ends of sources too."""
    for _ in range(20):
        weights = random_weights(random.randint(1, 6))
        limits = [random.choice([None, random.randint(1, 300)]) for _ in weights]
        limits[0] = None
        mixture = Mixture(weights, limits)
        walk = mixture.take(0, 1000)
        seen = [0] * len(weights)
        for position, (source, index) in enumerate(walk):
            assert index == seen[source]
            if position % 37 == 0:
                assert mixture.counts(position) == seen
            seen[source] += 1
        for _ in range(20):
            start = random.randrange(1000)
            length = random.randint(0, 1000 - start)
            assert mixture.take(start, length) == walk[start : start + length]


def test_a_used_up_source_leaves_its_share_to_the_others(seed):
    mixture = Mixture([0.5, 0.3, 0.2], [10, None, None])
    assert [phase.active for phase in mixture.phases] == [(0, 1, 2), (1, 2)]
    end = mixture.phases[1].start
    assert mixture.take(end - 1, 1) == [(0, 9)]
    before, after = mixture.counts(end), mixture.counts(end + 1000)
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 600, 400]


@pytest.mark.parametrize("weights", [[1e-9, 1.0], [1e6, 1.0, 1e-6]])
def test_extreme_weights(weights):
    mixture = Mixture(weights, [None] * len(weights))
    assert sum(mixture.counts(10**15)) == 10**15
    assert mixture.take(10**15, 3) == mixture.take(10**15 - 5, 8)[5:]


def test_every_window_of_limited_sources_comes_once(seed):
    weights, limits = random_weights(5), [random.randint(1, 200) for _ in range(5)]
    mixture = Mixture(weights, limits)
    assert mixture.total == sum(limits)
    assert sorted(mixture.take(0, mixture.total)) == [(i, j) for i in range(5) for j in range(limits[i])]
