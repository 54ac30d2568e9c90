"""The plan: what comes next, what is kept for the answer, and what the timeline says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from simulated.clock import SimulatedClock

from amptune.search.plan.budget import Budget
from amptune.search.plan.plan import WORTHWHILE, Plan, Stage, Step, Wants


class Stages:
    """Stages whose steps take simulated time, and are wanted once."""

    def __init__(self, budget_s: float) -> None:
        self.clock = SimulatedClock()
        self.plan = Plan(Budget(seconds=budget_s, started=self.clock(), clock=self.clock))
        self.done: list[str] = []

    def wants(
        self, what: str, seconds: float, worth: float, *, takes_s: float | None = None, needed: bool = False
    ) -> Wants:
        def act(_: float) -> None:
            self.done.append(what)
            self.clock.advance(seconds if takes_s is None else takes_s)

        stage: Stage = "comparison" if needed else "trial"
        step = Step(stage=stage, what=what, seconds=seconds, worth=worth, act=act, is_needed=needed)
        return lambda _: None if what in self.done else step


def carried_out(stages: Stages, *groups: list[Wants], needed_s: Callable[[], float] = lambda: 0.0) -> list[str]:
    stages.plan.carry_out(groups, needed_s)
    return stages.done


def test_what_is_worth_most_for_its_time_comes_first() -> None:
    stages = Stages(100.0)
    wanted = [stages.wants("long", 30.0, 0.1), stages.wants("short", 1.0, 0.01), stages.wants("must", 5.0, math.inf)]
    assert carried_out(stages, wanted) == ["must", "short", "long"]


def test_what_is_worth_too_little_is_not_done() -> None:
    stages = Stages(100.0)
    wanted = [stages.wants("little", 10.0, 9 * WORTHWHILE), stages.wants("enough", 10.0, 11 * WORTHWHILE)]
    assert carried_out(stages, wanted) == ["enough"]


def test_time_that_the_answer_needs_is_for_needed_steps_alone() -> None:
    stages = Stages(20.0)
    trials, answer = stages.wants("trial", 12.0, 1.0), stages.wants("answer", 10.0, 0.01, needed=True)
    assert carried_out(stages, [trials], [answer], needed_s=lambda: 10.0) == ["answer"]


def test_a_later_group_waits_until_the_earlier_ones_want_nothing() -> None:
    stages = Stages(100.0)
    first, last = stages.wants("search", 10.0, 0.01), stages.wants("wait", 1.0, math.inf)
    assert carried_out(stages, [first], [last]) == ["search", "wait"]


def test_a_step_that_takes_longer_than_expected_leaves_less_to_the_others() -> None:
    stages = Stages(20.0)
    wanted = [stages.wants("first", 5.0, 1.0, takes_s=18.0), stages.wants("second", 5.0, 0.1)]
    assert carried_out(stages, wanted) == ["first"]


def test_the_timeline_says_what_was_done_when_and_what_had_to_wait() -> None:
    stages = Stages(100.0)
    carried_out(stages, [stages.wants("a", 2.0, 1.0, takes_s=3.0), stages.wants("b", 2.0, 0.5, needed=True)])
    first, second = stages.plan.timeline
    assert (first["at_s"], first["seconds"], first["expected_s"], first["worth"]) == (0.0, 3.0, 2.0, 1.0)
    assert (first["what"], first["instead_of"]) == ("a", "comparison: b")
    assert (second["at_s"], second["instead_of"]) == (3.0, None)


def test_an_interrupted_step_stands_on_the_timeline() -> None:
    stages = Stages(100.0)

    def interrupted(_: float) -> None:
        stages.clock.advance(4.0)
        raise KeyboardInterrupt

    step = Step(stage="trial", what="a", seconds=1.0, worth=math.inf, act=interrupted)
    with pytest.raises(KeyboardInterrupt):
        stages.plan.carry_out([[lambda _: step]], lambda: 0.0)
    assert [one["seconds"] for one in stages.plan.timeline] == [4.0]
    assert stages.plan.timeline[0]["worth"] is None, "JSON has no infinity"
