"""The plan: what comes next, what is kept for the answer, and what the timeline says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from amptune.search.plan.plan import WORTHWHILE, Moment, Step, next_step
from amptune.search.plan.timeline import Timeline
from simulated.clock import SimulatedClock

from amptune.search.plan.budget import Budget


def step(what: str, seconds: float, worth: float, *, needed: bool = False) -> Step:
    return Step(stage="comparison" if needed else "trial", what=what, seconds=seconds, worth=worth, is_needed=needed)


TRIAL, ANSWER = step("trial", 12.0, 1.0), step("answer", 10.0, 0.01, needed=True)


@pytest.mark.parametrize(
    ("wanted", "time", "expected"),
    [
        ([step("long", 30.0, 0.1), step("short", 1.0, 0.01)], {}, ("short", 100.0)),
        ([step("must", 50.0, math.inf), step("short", 1.0, 0.01)], {}, ("must", 100.0)),
        ([step("little", 10.0, 9 * WORTHWHILE), step("enough", 10.0, 11 * WORTHWHILE)], {}, ("enough", 100.0)),
        # Time that the answer needs is for needed steps alone.
        ([TRIAL, ANSWER], {"left_s": 20.0, "needed_s": 10.0}, ("answer", 20.0)),
        ([TRIAL], {"left_s": 20.0, "needed_s": 10.0}, None),
        ([TRIAL], {"needed_s": 30.0}, ("trial", 70.0)),
    ],
)
def test_what_is_worth_most_for_its_time_comes_next_unless_the_answer_needs_the_time(
    wanted: list[Step], time: dict[str, Any], expected: tuple[str, float] | None
) -> None:
    choice = next_step(Moment(**{"left_s": 100.0, "needed_s": 0.0, **time}, wanted=tuple(wanted)))
    assert (choice and (choice.step.what, choice.limit_s)) == expected


def test_the_timeline_says_what_was_done_when_and_what_had_to_wait_though_interrupted() -> None:
    clock = SimulatedClock()
    timeline = Timeline(Budget(seconds=100.0, started=clock(), clock=clock))
    wanted = step("a", 2.0, math.inf), step("b", 2.0, 0.5, needed=True)
    first = next_step(Moment(left_s=100.0, needed_s=0.0, wanted=wanted))
    assert first is not None

    def interrupted() -> None:
        with timeline.noting(first):
            clock.advance(3.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (entry,) = timeline.entries
    assert (entry["at_s"], entry["seconds"], entry["expected_s"]) == (0.0, 3.0, 2.0)
    assert (entry["what"], entry["instead_of"]) == ("a", "comparison: b")
    assert entry["worth"] is None, "JSON has no infinity"
