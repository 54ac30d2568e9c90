"""The events that a tuning run reports while it runs; an observer is a function that takes them.

`left_s` are the seconds that are left of the run's budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from amptune.measure.results.outcome import Outcome
from amptune.measure.results.subject import Prepared
from amptune.policy.settings import Policy
from amptune.search.gate.judge import PolicyJudged
from amptune.search.job import Job
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = [
    "ComparisonStarted",
    "Compiling",
    "ContenderMeasured",
    "CurveTrained",
    "Event",
    "JobStarted",
    "Observer",
    "PolicyJudged",
    "SearchEnded",
    "SearchStarted",
    "Stage",
    "TrialEnded",
    "WorkloadBuilt",
]

# The purpose of rounds: to choose a winner, to check a claim.
Stage = Literal["comparison", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadBuilt:
    """The event that the workload is built and its parts are known."""

    prepared: Prepared
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """The event before a job; few other events follow for a while."""

    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStarted:
    """The event that the space is known; `remembered` trials come from an earlier run."""

    architecture: str
    size: int
    remembered: int
    study: str
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """The event that a graph begins to compile in the background."""

    policy: Policy
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    trial: Trial
    best: Trial | None
    baseline: Row | None
    """The baseline as this run measured it."""

    left_s: float
    objective: Objective = THROUGHPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEnded:
    """The end of the search; `because` says in words why no more policies are tried."""

    because: str
    trials: int
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonStarted:
    """The event before policies are measured in turn, each in its own process; `leader` is the best of them so far."""

    stage: Stage
    policies: tuple[Policy, ...]
    left_s: float
    leader: Policy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderMeasured:
    """One measured block of one contender; `launch` counts the starts of its process, from 0."""

    stage: Stage
    launch: int
    policy: Policy
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveTrained:
    """One long training of a policy with one of the `seeds`; `last_loss` is the loss of its last step."""

    policy: Policy
    seed: int
    seeds: int
    steps: int
    last_loss: float
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSaid:
    """A line of progress of another worker of the same command; workers count from 1, which is this process."""

    worker: int
    text: str


Event = (
    JobStarted
    | WorkloadBuilt
    | PolicyJudged
    | SearchStarted
    | Compiling
    | TrialEnded
    | SearchEnded
    | ComparisonStarted
    | ContenderMeasured
    | CurveTrained
    | WorkerSaid
)
Observer = Callable[[Event], None]
