"""The plan: what comes next, what is kept for the answer, and what the timeline says."""

from __future__ import annotations

from simulated.clock import SimulatedClock

from amptune.search.plan.budget import Budget
from amptune.search.plan.plan import WORTHWHILE, Choice, Moment, Stage, Step, next_step
from amptune.search.plan.timeline import Timeline


def step(what: str, seconds: float, worth: float, *, needed: bool = False) -> Step:
    stage: Stage = "comparison" if needed else "trial"
    return Step(stage=stage, what=what, seconds=seconds, worth=worth, is_needed=needed)


def chosen(*wanted: Step, left_s: float = 100.0, needed_s: float = 0.0) -> Choice | None:
    return next_step(Moment(left_s=left_s, needed_s=needed_s, wanted=wanted))


def names(*wanted: Step, left_s: float = 100.0, needed_s: float = 0.0) -> list[str]:
    """The steps in the order in which they are chosen, each taking as long as it says."""
    choice = chosen(*wanted, left_s=left_s, needed_s=needed_s)
    if choice is None:
        return []
    rest = [one for one in wanted if one is not choice.step]
    return [choice.step.what, *names(*rest, left_s=left_s - choice.step.seconds, needed_s=needed_s)]


def test_what_is_worth_too_little_is_not_done() -> None:
    assert names(step("little", 10.0, 9 * WORTHWHILE), step("enough", 10.0, 11 * WORTHWHILE)) == ["enough"]


def test_time_that_the_answer_needs_is_for_needed_steps_alone() -> None:
    wanted = step("trial", 12.0, 1.0), step("answer", 10.0, 0.01, needed=True)
    assert names(*wanted, left_s=20.0, needed_s=10.0) == ["answer"]
    assert chosen(wanted[0], left_s=20.0, needed_s=10.0) is None


def test_a_needed_step_may_use_all_the_time_and_another_what_is_free() -> None:
    for wanted, limit_s in ((step("trial", 5.0, 1.0), 70.0), (step("answer", 5.0, 1.0, needed=True), 100.0)):
        choice = chosen(wanted, needed_s=30.0)
        assert choice is not None
        assert choice.limit_s == limit_s


def test_the_timeline_says_what_was_done_when_and_what_had_to_wait() -> None:
    clock = SimulatedClock()
    timeline = Timeline(Budget(seconds=100.0, started=clock(), clock=clock))
    first = chosen(step("a", 2.0, 1.0), step("b", 2.0, 0.5, needed=True))
    assert first is not None
    with timeline.noting(first):
        clock.advance(3.0)
    (entry,) = timeline.entries
    assert (entry["at_s"], entry["seconds"], entry["expected_s"], entry["worth"]) == (0.0, 3.0, 2.0, 1.0)
    assert (entry["what"], entry["instead_of"]) == ("a", "comparison: b")
