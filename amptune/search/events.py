"""What a tuning run tells while it runs; an observer is a function that takes these.

`left_s` are the seconds that are left of its budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from amptune.measure.outcome import Outcome
from amptune.measure.subject import Prepared
from amptune.policy.settings import Policy
from amptune.search.gate import Judgement
from amptune.search.objective import THROUGHPUT, Objective
from amptune.search.trial import Trial

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


# What contenders are compared for: to choose a winner, to look for a faster one beside it, to see what each of its
# settings buys, to check a claim.
Stage = Literal["finals", "refinement", "ablation", "verify"]


# What narrows the space before the search: modules timed by themselves, the numerics of each precision judged, the
# largest batch found.
Groundwork = Literal["modules", "numerics", "batch-size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadBuilt:
    """The workload is built, and what it is made of is known."""

    prepared: Prepared
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundworkStarted:
    """Something is about to be measured before the search, which a while of little else follows."""

    groundwork: Groundwork


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStarted:
    """The space is known; `remembered` trials come from an earlier run."""

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
    """Graphs are about to be compiled beside one another, which a while of nothing else follows."""

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
    """`because` says in words why no more policies are tried."""

    because: str
    trials: int
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonStarted:
    """Contenders are about to be measured in turn, in processes of their own."""

    stage: Stage
    policies: tuple[Policy, ...]
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderMeasured:
    """One block of one contender; `launch` counts the starts of its process, from 0."""

    stage: Stage
    launch: int
    policy: Policy
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyJudged:
    """The numerics gate has spoken."""

    judgement: Judgement
    left_s: float


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
