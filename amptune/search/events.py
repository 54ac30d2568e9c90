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
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.trial import Trial

__all__ = [
    "ComparisonStarted",
    "Compiling",
    "ContenderMeasured",
    "Event",
    "Groundwork",
    "GroundworkStarted",
    "Observer",
    "PolicyJudged",
    "SearchEnded",
    "SearchStarted",
    "Stage",
    "TrialEnded",
    "TrialStarted",
    "WorkloadBuilt",
]

# The purpose of rounds: to choose a winner, to check a claim.
Stage = Literal["comparison", "verify"]

# Work before the search that narrows the space: timing each module, judging the numerics of each precision, finding the
# largest batch.
Groundwork = Literal["modules", "numerics", "batch-size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadBuilt:
    """The event that the workload is built and its parts are known."""

    prepared: Prepared
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundworkStarted:
    """The event before a measurement that precedes the search; few other events follow for a while."""

    groundwork: Groundwork


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStarted:
    """The event that the space is known; `remembered` trials come from an earlier run."""

    architecture: str
    size: int
    remembered: int
    study: str
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """The event before several graphs are compiled at once; no other event follows for a while."""

    policies: tuple[Policy, ...]
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    trial: Trial
    best: Trial | None
    baseline: Trial | None
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


Event = (
    WorkloadBuilt
    | GroundworkStarted
    | PolicyJudged
    | SearchStarted
    | TrialStarted
    | Compiling
    | TrialEnded
    | SearchEnded
    | ComparisonStarted
    | ContenderMeasured
)
Observer = Callable[[Event], None]
