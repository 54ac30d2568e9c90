"""The session of a command line: when it began, by which clock, and which evaluator measures."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from amptune.search.budget import Budget, Clock

if TYPE_CHECKING:
    from amptune.measure.evaluator import Evaluator

__all__ = ["Session", "pass_session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of a command line, which `started` by `clock`; without an `evaluator` this machine's workers measure."""

    started: float = field(default_factory=time.monotonic)
    clock: Clock = time.monotonic
    evaluator: Evaluator | None = None

    def budget(self, seconds: float, trials: int | None = None) -> Budget:
        """A budget of the whole command, what was spent before it was asked for included."""
        return Budget(seconds=seconds, trials=trials, started=self.started, clock=self.clock)

    def start_importing(self) -> None:
        """Begins to import what workers need while this process imports too, if workers are to measure."""
        from amptune.measure.processes import start_importing

        if self.evaluator is None:
            start_importing()


# Gives a command the `Session` that was passed as click's `obj`, else one that begins now.
pass_session = click.make_pass_decorator(Session, ensure=True)
