"""The live display of a run on a terminal: a bar, the time left, trials, the best so far, and what is being done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from threading import Lock

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from amptune.errors import visible
from amptune.measure.results.outcome import Failure
from amptune.search.events import ContenderMeasured, Event, JobStarted, TrialEnded, WorkerSaid
from amptune.search.job import JobKind
from amptune.search.plan.budget import Budget
from amptune.search.table.gains import counted
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["STAGES", "LiveDisplay", "Standing", "standing_after"]

STAGES = {
    "comparison": "comparison",
    "verify": "the claim measured again",
}
_JOBS: dict[JobKind, str] = {
    "study": "opening",
    "build": "building",
    "batch size": "looking for",
    "trial": "measuring",
    "numerics": "judging the numerics of",
    "cure": "looking for the modules to keep in FP32 under",
    "modules": "timing",
    "wait": "waiting",
    "graph": "judging the compiled graph of",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A snapshot of a run: trials that ended, those that failed, the best one, and the present job."""

    doing: str = "building the workload"
    ended: int = 0
    failed: int = 0
    best: Trial | None = None
    baseline: Row | None = None
    others: Mapping[int, str] = field(default_factory=dict)
    """The last line of each other worker, by its number."""

    @property
    def trials(self) -> str:
        if not self.ended:
            return ""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{counted(self.ended, 'trial')}{failed}"

    @property
    def leading(self) -> str:
        """The best single trial so far; empty if there is none. How much better it is, only the comparison tells."""
        if self.best is None or self.baseline is None:
            return ""
        return f"best trial so far: {'the baseline' if self.best.policy == self.baseline.policy else self.best.policy}"


def standing_after(standing: Standing, event: Event) -> Standing:
    """Returns what is known after an event."""
    match event:
        case JobStarted() if event.job.kind in _JOBS:
            return replace(standing, doing=f"{_JOBS[event.job.kind]} {event.job.what}")
        case ContenderMeasured():
            return replace(standing, doing=f"{STAGES[event.stage]}, launch {event.launch + 1}: {event.policy}")
        case TrialEnded():
            return replace(
                standing,
                ended=standing.ended + 1,
                failed=standing.failed + isinstance(event.trial.outcome, Failure),
                best=event.best,
                baseline=event.baseline,
            )
        case WorkerSaid():
            return replace(standing, others={**standing.others, event.worker: event.text})
        case _:
            return standing


class LiveDisplay:
    """Two or three lines at the bottom of a terminal that show the standing, and one for each other worker.

    They are gone at the end.
    """

    def __init__(self, console: Console, budget: Budget) -> None:
        self._budget = budget
        self._spinner = Spinner("dots")
        self.standing = Standing()
        self._lock = Lock()
        # The user's own prints stay in the workers; what this process prints on stdout comes when the display is gone.
        self.live = Live(self, console=console, transient=True, redirect_stdout=False, refresh_per_second=8)

    def take(self, event: Event) -> None:
        """Shows what is known after an event, which may come from any thread."""
        with self._lock:
            self.standing = standing_after(self.standing, event)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._clock()
        if self.standing.leading:
            yield Text(visible(self.standing.leading), no_wrap=True, overflow="ellipsis", style="green")
        doing = Table.grid(padding=(0, 1))
        doing.add_column()
        doing.add_column(no_wrap=True, overflow="ellipsis")
        doing.add_row(self._spinner, Text(visible(self.standing.doing)))
        yield doing
        for worker, text in sorted(self.standing.others.items()):
            yield Text(visible(f"worker {worker}: {text}"), no_wrap=True, overflow="ellipsis", style="dim")

    def _clock(self) -> Table:
        total_s, spent_s = self._budget.seconds, max(0.0, self._budget.spent_s)
        left = f"{ceil(max(0.0, total_s - spent_s))} of {total_s:.0f} s left"
        line = Table.grid(padding=(0, 2), expand=False)
        line.add_row(ProgressBar(total=total_s, completed=min(spent_s, total_s), width=30), left, self.standing.trials)
        return line
