"""The smallest set of modules that cures a policy, by as few questions as can be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.search.gate.repair import smallest_cure

Members = frozenset[str]


class Oracle:
    """Cures where any of `cures` is kept, and remembers what it was asked."""

    def __init__(self, *cures: Iterable[str]) -> None:
        self.cures = [frozenset(cure) for cure in cures]
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, kept: Sequence[str]) -> bool:
        self.asked.append(tuple(kept))
        return any(cure <= set(kept) for cure in self.cures)


def units(count: int) -> list[str]:
    return [f"layer.{number}" for number in range(count)]


def questions(count: int, culprits: Collection[str]) -> int:
    """How many it took to find exactly these."""
    oracle = Oracle(culprits)
    assert smallest_cure(units(count), oracle) == tuple(unit for unit in units(count) if unit in culprits)
    return len(oracle.asked)


@pytest.mark.parametrize(("count", "culprits"), [(n, d) for n in (64, 256, 1024) for d in (1, 2, 4)])
def test_few_culprits_are_found_in_few_questions_wherever_they_stand(count: int, culprits: int) -> None:
    rng, names = random.Random(count + culprits), units(count)
    chosen = [names[:culprits], names[-culprits:], *(rng.sample(names, culprits) for _ in range(15))]
    if (count, culprits) == (64, 2):
        chosen += [list(pair) for pair in combinations(names, 2)]
    assert max(questions(count, one) for one in chosen) <= 1.5 * culprits * math.log2(count / culprits) + culprits


def test_a_guess_that_cures_is_searched_alone_and_another_is_not() -> None:
    names = units(1024)
    oracle = Oracle([names[700], names[900]])
    assert smallest_cure(names, oracle, suspects=[names[900], names[3], names[700]]) == (names[700], names[900])
    assert len(oracle.asked) <= 6
    assert oracle.asked[0] == (names[3], names[700], names[900])
    oracle = Oracle([names[5], names[40]])
    assert smallest_cure(names[:64], oracle, suspects=names[:8]) == (names[5], names[40])
    assert oracle.asked[:2] == [tuple(names[:8]), tuple(names[:64])]
    assert all(len(kept) > 8 or names[40] in kept for kept in oracle.asked[1:])


NAMES = units(12)
SETS = st.frozensets(st.sampled_from(NAMES), min_size=1)
ORDERS = st.lists(st.sampled_from(NAMES), unique=True, min_size=1)


def minimal(found: Iterable[str], cures: Callable[[Sequence[str]], bool]) -> bool:
    kept = list(found)
    return cures(kept) and not any(cures([other for other in kept if other != unit]) for unit in kept)


@given(order=ORDERS, cures=st.lists(SETS, max_size=4), suspects=st.frozensets(st.sampled_from(NAMES)))
def test_nothing_can_be_dropped_from_the_answer(order: list[str], cures: list[Members], suspects: Members) -> None:
    """Whatever cures, in any order, and whoever is suspected, units that are not there included."""
    oracle = Oracle(*cures)
    found = smallest_cure(order, oracle, suspects=suspects)
    assert (found is not None) == any(cure <= set(order) for cure in cures)
    assert len(set(map(frozenset, oracle.asked))) == len(oracle.asked)
    assert all(oracle.asked)
    if found is not None:
        assert minimal(found, Oracle(*cures))
        assert list(found) == [unit for unit in order if unit in found]
