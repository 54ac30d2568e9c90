"""The plan: which of the steps that the stages want comes next, and what was done when, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from amptune.search.plan.budget import Budget

__all__ = ["Done", "Plan", "Stage", "Step", "Wants"]

Stage = Literal["build", "batch size", "compile", "trial", "numerics", "cure", "modules", "wait", "graph", "comparison"]
# A step that promises less in a second of its time is not worth doing: 1 % of speed in a minute.
WORTHWHILE = 0.01 / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that a stage wants to take. `act` takes it, in about `seconds`, and is told how many it may use.

    `worth` is what it is expected to add to the logarithm of the answer's score; infinite if there is no answer without
    it. A step that `is_needed` may use the time that is kept for the answer.
    """

    stage: Stage
    what: str
    seconds: float
    worth: float
    act: Callable[[float], None]
    is_needed: bool = False

    @property
    def rate(self) -> float:
        """Its worth for each second."""
        return self.worth / max(self.seconds, MOMENT_S)


# Less time than this is none.
MOMENT_S = 0.1

# Asks a stage for what it wants to do next in this many seconds; None if there is nothing.
Wants = Callable[[float], Step | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One step on the timeline: its start and its length, with what was expected, and the step that had to wait."""

    at_s: float
    seconds: float
    stage: Stage
    what: str
    expected_s: float
    worth: float
    instead_of: str | None


@dataclass
class Plan:
    """The order of all steps of a run: at each moment the one that is worth most for its time.

    `started` is called before each.
    """

    budget: Budget
    started: Callable[[Step], None] = lambda _: None
    done: list[Done] = field(default_factory=list)

    def carry_out(self, stages: Sequence[Sequence[Wants]], needed_s: Callable[[], float]) -> None:
        """Does what the stages want, step by step, until nothing more is worthwhile or fits into the time.

        `stages` of one group compete; a later group has its turn when no earlier one has a step. `needed_s` returns the
        seconds that the answer still needs; only steps that are needed may use them.
        """
        while True:
            free_s = self.budget.left_s - needed_s()
            ranked = next(filter(None, (self._ranked(group, free_s) for group in stages)), None)
            if ranked is None:
                return
            other = next((step for step in ranked if step.stage != ranked[0].stage), None)
            self.do(ranked[0], self.budget.left_s if ranked[0].is_needed else free_s, instead_of=other)

    @staticmethod
    def _ranked(stages: Sequence[Wants], free_s: float) -> list[Step]:
        """Returns the steps that are worthwhile and fit into the time, the one with the highest rate first."""
        wanted = [step for wants in stages if (step := wants(free_s)) is not None]
        fits = [step for step in wanted if step.is_needed or (free_s >= MOMENT_S and step.seconds <= free_s)]
        worthwhile = (step for step in fits if step.is_needed or step.rate >= WORTHWHILE)
        return sorted(worthwhile, key=lambda step: -step.rate)

    def do(self, step: Step, limit_s: float, instead_of: Step | None = None) -> None:
        """Does one step and notes it on the timeline, also if it is interrupted."""
        began_s = self.budget.spent_s
        self.started(step)
        try:
            step.act(limit_s)
        finally:
            self.done.append(
                Done(
                    at_s=began_s,
                    seconds=self.budget.spent_s - began_s,
                    stage=step.stage,
                    what=step.what,
                    expected_s=step.seconds,
                    worth=step.worth,
                    instead_of=None if instead_of is None else f"{instead_of.stage}: {instead_of.what}",
                )
            )

    @property
    def timeline(self) -> list[dict[str, Any]]:
        """The steps that were taken, in order, as plain data; numbers are rounded to four decimals."""

        def plain(value: Any) -> Any:
            if not isinstance(value, float):
                return value
            return round(value, 4) if math.isfinite(value) else None

        return [{name: plain(value) for name, value in asdict(one).items()} for one in self.done]
