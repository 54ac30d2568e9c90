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
SIZES = [(n, d) for n in (64, 256, 1024) for d in (1, 2, 4)]


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


def bound(count: int, culprits: int) -> float:
    return 1.5 * culprits * math.log2(count / culprits) + culprits


@pytest.mark.parametrize(("count", "culprits"), SIZES)
def test_few_culprits_are_found_in_few_questions(count: int, culprits: int) -> None:
    rng = random.Random(count + culprits)
    asked = [questions(count, rng.sample(units(count), culprits)) for _ in range(200)]
    assert max(asked) <= bound(count, culprits)


@pytest.mark.parametrize(("count", "culprits"), [(64, 1), (256, 1), (1024, 1), (64, 2)])
def test_the_bound_holds_wherever_the_culprits_stand(count: int, culprits: int) -> None:
    assert max(questions(count, chosen) for chosen in combinations(units(count), culprits)) <= bound(count, culprits)


@pytest.mark.parametrize(("count", "culprits"), SIZES)
def test_the_bound_holds_for_neighbours_at_either_end(count: int, culprits: int) -> None:
    assert questions(count, units(count)[:culprits]) <= bound(count, culprits)
    assert questions(count, units(count)[-culprits:]) <= bound(count, culprits)


def test_a_good_guess_makes_it_cheaper() -> None:
    names = units(1024)
    oracle = Oracle([names[700], names[900]])
    assert smallest_cure(names, oracle, suspects=[names[900], names[3], names[700]]) == (names[700], names[900])
    assert len(oracle.asked) <= 6
    assert oracle.asked[0] == (names[3], names[700], names[900])


def test_a_guess_that_does_not_cure_is_not_searched_alone() -> None:
    names = units(64)
    oracle = Oracle([names[5], names[40]])
    assert smallest_cure(names, oracle, suspects=names[:8]) == (names[5], names[40])
    assert oracle.asked[:2] == [tuple(names[:8]), tuple(names)]
    assert all(len(kept) > 8 or names[40] in kept for kept in oracle.asked[1:])


def test_what_cannot_be_cured_takes_one_question_or_two() -> None:
    oracle = Oracle()
    assert smallest_cure(units(64), oracle) is None
    assert len(oracle.asked) == 1
    assert smallest_cure(units(64), oracle, suspects=["layer.3"]) is None
    assert len(oracle.asked) == 3


def test_suspecting_every_unit_asks_about_all_of_them_once() -> None:
    oracle = Oracle()
    assert smallest_cure(units(8), oracle, suspects=units(8)) is None
    assert len(oracle.asked) == 1


def test_no_units_cure_nothing_and_nothing_is_asked() -> None:
    oracle = Oracle([])
    assert smallest_cure([], oracle) is None
    assert oracle.asked == []


def test_suspects_that_are_no_units_are_ignored() -> None:
    oracle = Oracle(["layer.1"])
    assert smallest_cure(units(4), oracle, suspects=["elsewhere"]) == ("layer.1",)
    assert not any("elsewhere" in kept for kept in oracle.asked)


def test_all_units_may_be_needed() -> None:
    assert questions(16, units(16)) <= 16 * 4


def test_of_alternative_cures_the_one_that_ends_first_is_found() -> None:
    names = units(100)
    oracle = Oracle([names[80], names[10]], [names[20], names[50]], [names[99]])
    assert smallest_cure(names, oracle) == (names[20], names[50])


def test_running_out_of_time_passes_through() -> None:
    def cures(_: Sequence[str]) -> bool:
        raise TimeoutError("no time left")

    with pytest.raises(TimeoutError, match="no time left"):
        smallest_cure(units(4), cures)


NAMES = units(12)
SETS = st.frozensets(st.sampled_from(NAMES), min_size=1)
ORDERS = st.lists(st.sampled_from(NAMES), unique=True, min_size=1)


def minimal(found: Iterable[str], cures: Callable[[Sequence[str]], bool]) -> bool:
    kept = list(found)
    return cures(kept) and not any(cures([other for other in kept if other != unit]) for unit in kept)


@given(order=ORDERS, cures=st.lists(SETS, max_size=4), suspects=st.frozensets(st.sampled_from(NAMES)))
def test_nothing_can_be_dropped_from_the_answer(order: list[str], cures: list[Members], suspects: Members) -> None:
    oracle = Oracle(*cures)
    found = smallest_cure(order, oracle, suspects=suspects)
    curable = any(cure <= set(order) for cure in cures)
    assert (found is not None) == curable
    assert len(set(map(frozenset, oracle.asked))) == len(oracle.asked)
    assert all(oracle.asked)
    if found is not None:
        assert minimal(found, Oracle(*cures))
        assert list(found) == [unit for unit in order if unit in found]


@given(order=ORDERS, suspects=st.frozensets(st.sampled_from(NAMES)), seed=st.integers(0, 1000))
def test_an_oracle_that_contradicts_itself_still_accepted_the_answer(
    order: list[str], suspects: Members, seed: int
) -> None:
    """Each set but that of all units cures by the toss of a coin."""
    accepted: dict[Members, bool] = {}

    def whimsical(kept: Sequence[str]) -> bool:
        assert frozenset(kept) not in accepted
        toss = random.Random(f"{seed} {sorted(kept)}").random()
        accepted[frozenset(kept)] = set(kept) == set(order) or toss < 0.5
        return accepted[frozenset(kept)]

    found = smallest_cure(order, whimsical, suspects=suspects)
    assert found is not None
    assert accepted[frozenset(found)]
