"""The smallest set of modules that cures a policy, by as few questions as can be."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.search.gate.repair import smallest_cure

UNITS = [f"layer.{number}" for number in range(1024)]


class Oracle:
    """Cures where any of `cures` is kept, and remembers what it was asked."""

    def __init__(self, *cures: Iterable[str]) -> None:
        self.cures = [frozenset(cure) for cure in cures]
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, kept: Sequence[str]) -> bool:
        self.asked.append(tuple(kept))
        return any(cure <= set(kept) for cure in self.cures)


def questions(culprits: Collection[str], count: int) -> int:
    """How many it took to find exactly these."""
    oracle = Oracle(culprits)
    assert smallest_cure(UNITS[:count], oracle) == tuple(unit for unit in UNITS if unit in culprits)
    return len(oracle.asked)


@pytest.mark.parametrize("count", [64, 1024])
@pytest.mark.parametrize("culprits", [1, 2, 4])
def test_few_culprits_are_found_in_few_questions_wherever_they_stand(count: int, culprits: int) -> None:
    rng, names = random.Random(count + culprits), UNITS[:count]
    chosen = [names[:culprits], names[-culprits:], *(rng.sample(names, culprits) for _ in range(15))]
    most = max(questions(one, count) for one in chosen)
    assert most <= 1 + culprits * (math.ceil(math.log2(count)) + 1)


FEW = st.sampled_from(UNITS[:12])


@given(
    order=st.lists(FEW, unique=True, min_size=1),
    cures=st.lists(st.frozensets(FEW, min_size=1), max_size=4),
    suspects=st.frozensets(FEW),
)
def test_nothing_can_be_dropped_from_the_answer(
    order: list[str], cures: list[frozenset[str]], suspects: frozenset[str]
) -> None:
    """Whatever cures, in any order, and whoever is suspected, units that are not there included."""
    oracle = Oracle(*cures)
    found = smallest_cure(order, oracle, suspects=suspects)
    assert (found is not None) == any(cure <= set(order) for cure in cures)
    assert len(set(map(frozenset, oracle.asked))) == len(oracle.asked)
    if found is not None:
        cured = Oracle(*cures)
        assert cured(found)
        assert not any(cured([other for other in found if other != unit]) for unit in found)
        assert list(found) == [unit for unit in order if unit in found]
