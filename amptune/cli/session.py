"""The session of a command line: its start time, its clock, and the evaluator that measures."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from amptune.cli.device import require_device, require_ranks
from amptune.search.plan.budget import Budget, Clock

if TYPE_CHECKING:
    from amptune.cli.torchrun import Torchrun
    from amptune.measure.evaluator import Evaluator

__all__ = ["Session", "pass_session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of a command line: its start time by `clock`; if `evaluator` is None, this machine's workers measure.

    `torchrun` is the job that it is the first process of.
    """

    started: float = field(default_factory=time.monotonic)
    clock: Clock = time.monotonic
    evaluator: Evaluator | None = None
    torchrun: Torchrun | None = None

    def devices(self, asked: int, device: str | None) -> int:
        """Returns how many devices train together: so many as `asked`, under torchrun one for each of its processes.

        Raises `DeviceError` if they cannot be measured under torchrun, `click.BadParameter` if other ones are asked.
        """
        if self.torchrun is None:
            return asked
        require_ranks(self.torchrun, device)
        if asked not in (1, self.torchrun.processes):
            here = f"torchrun started {self.torchrun.processes} processes: leave it out"
            raise click.BadParameter(here, param_hint="--devices")
        return self.torchrun.processes

    def ranks(self, devices: int, device: str | None) -> int:
        """Returns over how many processes steps are timed on this machine; an `evaluator` knows by itself."""
        from amptune.search.request import ranks_of

        if self.torchrun is not None:
            return devices
        return ranks_of(devices, device) if self.evaluator is None else 1

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
