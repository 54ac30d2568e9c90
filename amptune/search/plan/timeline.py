"""The timeline: what a run did when, and what it chose that from, so that each choice can be made again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from amptune.search.plan.budget import Budget
from amptune.search.plan.plan import Choice, Moment, Step

__all__ = ["Timeline"]

# What an entry says of each step that was wanted.
OF_A_STEP = ("stage", "what", "seconds", "worth", "is_needed")


@dataclass
class Timeline:
    """The steps of a run by the clock of its budget; `started` is called before each.

    `entries` are plain data, in order: start and length, what was expected, which step had to wait, and of a step that
    was chosen the moment of the choice. JSON has no infinity, so that is None.
    """

    budget: Budget
    started: Callable[[Step], None] = lambda _: None
    entries: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def noting(self, choice: Choice) -> Iterator[None]:
        """Notes the step that is taken meanwhile, also if it is interrupted."""
        step, other, began_s = choice.step, choice.instead_of, self.budget.spent_s
        self.started(step)
        try:
            yield
        finally:
            self.entries.append(
                {
                    "at_s": _rounded(began_s),
                    "seconds": _rounded(self.budget.spent_s - began_s),
                    "stage": step.stage,
                    "what": step.what,
                    "expected_s": _rounded(step.seconds),
                    "worth": _rounded(step.worth),
                    "instead_of": None if other is None else f"{other.stage}: {other.what}",
                    "chosen_from": None if choice.moment is None else _plain(choice.moment),
                }
            )


def _plain(moment: Moment) -> dict[str, Any]:
    wanted = [{name: _finite(getattr(step, name)) for name in OF_A_STEP} for step in moment.wanted]
    return {"left_s": moment.left_s, "needed_s": _finite(moment.needed_s), "wanted": wanted}


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
