"""A tuning run: job after job, until the answer is known; a decision can be had at any moment."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.errors import StudyError
from amptune.policy.findings import Finding
from amptune.search.decide.decision import Decision
from amptune.search.decided import decision_of
from amptune.search.events import Observer, SearchEnded
from amptune.search.job import Job
from amptune.search.next_job import next_job
from amptune.search.perform import Performer
from amptune.search.state import State
from amptune.search.timeline import Timeline

__all__ = ["TuningRun"]


@dataclass
class TuningRun:
    """A tuning run in progress: its state, and what performs its jobs."""

    state: State
    performer: Performer
    timeline: Timeline
    observer: Observer

    def find_answer(self) -> None:
        """Does what comes next, until that is the answer."""
        try:
            while isinstance(job := next_job(self.state), Job):
                with self.timeline.noting(job, self.state):
                    self.state = self.performer.perform(job, self.state)
            because = job.because
        except StudyError as error:  # a failing storage, or no worker can be started: what is in memory still decides
            because = str(error)
        finally:
            self.performer.study.end(self.timeline.entries)
        left_s = self.state.request.budget.left_s
        self.observer(SearchEnded(because=because, trials=self.state.trials_made, left_s=left_s))

    def decision(self, *, interrupted: bool = False) -> Decision | None:
        """Returns the decision as things stand; None if the baseline was not measured, or failed."""
        self.performer.study.catch_up()
        self.state = self.performer.known(self.state)
        noticed = [*self.performer.findings, *self._lost]
        return decision_of(self.state, noticed, interrupted=interrupted, timeline=self.timeline.entries)

    @property
    def _lost(self) -> tuple[Finding, ...]:
        lost = self.performer.study.lost
        if lost is None:
            return ()
        message = f"{lost}: later runs and `amptune report` lack some of what this run measured"
        return (Finding(code="not-recorded", message=message),)
