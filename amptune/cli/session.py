"""The session of a command line: its start time, its clock, and the evaluator that measures."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from amptune.cli.device import require_device
from amptune.search.plan.budget import Budget, Clock

if TYPE_CHECKING:
    from amptune.measure.evaluator import Evaluator

__all__ = ["Session", "pass_session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of a command line: its start time by `clock`; if `evaluator` is None, this machine's workers measure."""

    started: float = field(default_factory=time.monotonic)
    clock: Clock = time.monotonic
    evaluator: Evaluator | None = None

    def budget(self, seconds: float, trials: int | None = None) -> Budget:
        """Returns a budget for the whole command, including the time spent before this call."""
        return Budget(seconds=seconds, trials=trials, started=self.started, clock=self.clock)

    def start_importing(self, target: str, device: str | None) -> None:
        """Starts importing what workers need and what `target` imports, unless `evaluator` is given.

        Raises `TargetError` or `DeviceError` before, if the target's file or the device does not exist.
        """
        from amptune.measure.workers.processes import start_importing
        from amptune.workload.targets import parse_target

        parse_target(target)
        if self.evaluator is None:
            require_device(device)
            start_importing(target)


# Gives a command the `Session` passed as click's `obj`, else a new one that starts now.
pass_session = click.make_pass_decorator(Session, ensure=True)
