"""The plan: which of the steps that the stages want comes next. Pure: what it chooses follows from a moment alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from amptune.policy.settings import Policy

__all__ = ["Choice", "Moment", "Stage", "Step", "Wants", "next_step"]

Stage = Literal["build", "batch size", "compile", "trial", "numerics", "cure", "modules", "wait", "graph", "comparison"]
# A step that promises less in a second of its time is not worth doing: 1 % of speed in a minute.
WORTHWHILE = 0.01 / 60
# Less time than this is none.
MOMENT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that a stage wants to take, in about `seconds`: of these `policies`, in `fresh` processes or not.

    `worth` is what it is expected to add to the logarithm of the answer's score; infinite if there is no answer without
    it. A step that `is_needed` may use the time that is kept for the answer.
    """

    stage: Stage
    what: str
    seconds: float
    worth: float
    is_needed: bool = False
    policies: tuple[Policy, ...] = ()
    fresh: bool = False

    @property
    def rate(self) -> float:
        """Its worth for each second."""
        return self.worth / max(self.seconds, MOMENT_S)


# Asks a stage for what it wants to do next in this many seconds; None if there is nothing.
Wants = Callable[[float], Step | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All that the plan looks at: the time that is left, what the answer still needs of it, and the steps wanted."""

    left_s: float
    needed_s: float
    wanted: tuple[Step, ...]

    @property
    def free_s(self) -> float:
        """The seconds for steps that the answer does not need."""
        return self.left_s - self.needed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A step to take within `limit_s`; the best of another stage is done later, `instead_of` which it comes."""

    step: Step
    limit_s: float
    instead_of: Step | None = None
    moment: Moment | None = None


def next_step(moment: Moment) -> Choice | None:
    """Returns the step that is worth most for its time; None if none is worthwhile or fits into the time."""
    ranked = sorted(filter(lambda step: _may_come(step, moment.free_s), moment.wanted), key=lambda step: -step.rate)
    if not ranked:
        return None
    first = ranked[0]
    return Choice(
        step=first,
        limit_s=moment.left_s if first.is_needed else moment.free_s,
        instead_of=next((step for step in ranked if step.stage != first.stage), None),
        moment=moment,
    )


def _may_come(step: Step, free_s: float) -> bool:
    return step.is_needed or (free_s >= MOMENT_S and step.seconds <= free_s and step.rate >= WORTHWHILE)
