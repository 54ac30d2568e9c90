"""The timeline: which job a run did when, in plain data, so that a run can be followed job by job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from amptune.search.job import Job
from amptune.search.plan.budget import Budget

__all__ = ["Timeline"]


@dataclass
class Timeline:
    """The jobs of a run by the clock of its budget, in order; `started` is called before each."""

    budget: Budget
    started: Callable[[Job], None] = lambda _: None
    entries: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def noting(self, job: Job) -> Iterator[None]:
        """Notes a job that is done meanwhile, also if it is interrupted."""
        began_s = self.budget.spent_s
        self.started(job)
        try:
            yield
        finally:
            seconds = self.budget.spent_s - began_s
            self.entries.append({"at_s": round(began_s, 4), "seconds": round(seconds, 4), **job.as_dict()})
