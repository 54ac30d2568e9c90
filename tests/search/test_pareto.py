"""What nothing else beats, and what an objective takes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.policy.settings import Policy
from amptune.search.decide.pareto import ParetoPoint, best_point, front_of, spread_along
from amptune.search.table.objective import THROUGHPUT, Objective

# Few different values, so that many are equal.
figures = st.floats(min_value=1e-3, max_value=1e6) | st.sampled_from([1.0, 2.0, 3.0, 4.0])
points = st.builds(
    ParetoPoint,
    policy=st.builds(Policy, batch_size=st.integers(1, 1000)),
    samples_per_s=figures,
    peak_memory_mib=figures,
    energy_j_per_sample=st.none() | figures,
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
    assert [one.costs for one in front] == [one.costs for one in front_of(some[::-1])]


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
    assert [one.policy.batch_size for one in spread_along(front, 5)] == [1, 9, 17, 25, 33]


@given(points)
def test_a_point_survives_the_file_to_four_digits(one: ParetoPoint) -> None:
    read = ParetoPoint.from_dict(one.as_dict())
    assert (read.policy, read.judged) == (one.policy, one.judged)
    assert (read.energy_j_per_sample is None) == (one.energy_j_per_sample is None)
    assert read.figures == pytest.approx({name: getattr(one, name) for name in read.figures}, rel=1e-3)


FAST, SMALL, THRIFTY = point(200.0, 900.0, 2.0), point(80.0, 300.0, 1.9), point(120.0, 700.0, 1.0)


@pytest.mark.parametrize(
    ("objective", "best"),
    [
        (THROUGHPUT, FAST),
        (Objective("memory"), THRIFTY),
        (Objective("memory", 0.8), SMALL),
        (Objective("memory", 9.0), None),
        (Objective("energy"), THRIFTY),
    ],
)
def test_each_objective_takes_its_own_point(objective: Objective, best: ParetoPoint | None) -> None:
    assert best_point([FAST, SMALL, THRIFTY], objective, 100.0) == best
    assert best_point([point(1.0, 1.0)], Objective("energy"), 1.0) is None
