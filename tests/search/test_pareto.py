"""What nothing else beats, and what an objective takes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_objective import measured

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.pareto import ParetoPoint, best_point, front_of, points_of, spread_along
from amptune.search.gate.judgements import Judgements
from amptune.search.sampler.records import GateRecord
from amptune.search.table.effects import GPU
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import verdict_of

figures = st.floats(min_value=1e-3, max_value=1e6)
# Few different values, so that many are equal.
coarse = st.sampled_from([1.0, 2.0, 3.0, 4.0])
points = st.builds(
    ParetoPoint,
    policy=st.builds(Policy, batch_size=st.integers(1, 1000)),
    samples_per_s=figures | coarse,
    peak_memory_mib=figures | coarse,
    energy_j_per_sample=st.none() | figures | coarse,
    judged=st.booleans(),
)


def point(speed: float, mib: float, joules: float | None = None, *, batch: int = 1) -> ParetoPoint:
    return ParetoPoint(
        policy=Policy(batch_size=batch), samples_per_s=speed, peak_memory_mib=mib, energy_j_per_sample=joules
    )


@given(st.lists(points, max_size=30))
def test_no_point_of_the_set_beats_another_and_every_other_is_beaten_or_equal(some: list[ParetoPoint]) -> None:
    front = front_of(some)
    assert not any(a.dominates(b) for a in front for b in front)
    for other in some:
        assert other in front or any(one.dominates(other) or one.costs == other.costs for one in front)
    assert set(front) <= set(some)
    assert list(front) == sorted(front, key=lambda one: -one.samples_per_s)


@given(st.lists(points, max_size=20))
def test_the_set_is_the_same_in_whatever_order_trials_came(some: list[ParetoPoint]) -> None:
    assert [one.costs for one in front_of(some)] == [one.costs for one in front_of(some[::-1])]


@given(st.lists(points, min_size=1, max_size=40), st.integers(3, 12))
def test_of_many_points_the_ends_are_kept(some: list[ParetoPoint], most: int) -> None:
    front = front_of(some)
    kept = spread_along(front, most)
    assert len(kept) == min(len(front), most)
    assert list(kept) == [one for one in front if one in kept]
    for axis in range(3):
        assert min(one.costs[axis] for one in kept) == min(one.costs[axis] for one in front)


def test_the_points_kept_are_spread_along_the_set() -> None:
    front = front_of([point(100.0 * 2**-i, 1000.0 * 2**-i, batch=i + 1) for i in range(33)])
    kept = [one.policy.batch_size or 0 for one in spread_along(front, 5)]
    assert kept == [1, 9, 17, 25, 33]


@given(points)
def test_a_point_survives_the_file_to_four_digits(one: ParetoPoint) -> None:
    read = ParetoPoint.from_dict(one.as_dict())
    assert (read.policy, read.judged) == (one.policy, one.judged)
    assert read.samples_per_s == pytest.approx(one.samples_per_s, rel=1e-3)
    assert (read.energy_j_per_sample is None) == (one.energy_j_per_sample is None)


def test_energy_that_is_unknown_beats_nothing() -> None:
    known, unknown = point(1.0, 10.0, 5.0), point(2.0, 10.0, batch=2)
    assert not unknown.dominates(known)
    assert set(front_of([known, unknown])) == {known, unknown}


def test_what_failed_or_was_rejected_is_no_point() -> None:
    trials = [
        Trial(number=0, policy=STOCK, outcome=measured(), seconds=1.0),
        Trial(number=1, policy=amp_recipe("fp16"), outcome=measured(ms=1.0), seconds=1.0),
        Trial(number=2, policy=amp_recipe("bf16"), outcome=Failure(kind="oom", message=""), seconds=1.0),
        Trial(number=3, policy=STOCK, outcome=measured(ms=16.0), seconds=1.0),  # another worker's
    ]
    rows = [trial.row for trial in trials]
    verdict = verdict_of(rows, STOCK, GPU)
    assert verdict is not None
    rejects = GateRecord(policy=amp_recipe("fp16"), passes=False, used=2.0, words="")
    none: Judgements[GateRecord] = Judgements(STOCK)
    (one,) = points_of(trials, verdict, none.also(rejects))
    assert (one.policy, one.judged) == (STOCK, True)
    assert one.samples_per_s == pytest.approx(2000.0), "the newest trial of a policy"


def test_each_objective_takes_its_own_point() -> None:
    fast, small, thrifty = point(200.0, 900.0, 2.0), point(80.0, 300.0, 1.9), point(120.0, 700.0, 1.0)
    some = [fast, small, thrifty]
    assert best_point(some, THROUGHPUT, 100.0) == fast
    assert best_point(some, Objective("memory"), 100.0) == thrifty
    assert best_point(some, Objective("memory", 0.8), 100.0) == small
    assert best_point(some, Objective("energy"), 100.0) == thrifty
    assert best_point([point(1.0, 1.0)], Objective("energy"), 1.0) is None
    assert best_point(some, Objective("memory", 9.0), 100.0) is None
