"""What a tuning run tells while it runs; an observer is a function that takes these."""

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
    "Observer",
    "PolicyJudged",
    "SearchEnded",
    "SearchStarted",
    "Stage",
    "TrialEnded",
    "TrialStarted",
]


# What contenders are compared for: to choose a winner, to look for a faster one beside it, to see what each of its
# settings buys, to check a claim.
Stage = Literal["finals", "refinement", "ablation", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStarted:
    """The workload is built and the space known; `remembered` trials come from an earlier run."""

    prepared: Prepared
    architecture: str
    size: int
    remembered: int
    study: str
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """Graphs are about to be compiled beside one another, which a while of nothing else follows."""

    policies: tuple[Policy, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonStarted:
    """Contenders are about to be measured in turn, in processes of their own."""

    stage: Stage
    policies: tuple[Policy, ...]


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


Event = (
    PolicyJudged
    | SearchStarted
    | TrialStarted
    | Compiling
    | TrialEnded
    | SearchEnded
    | ComparisonStarted
    | ContenderMeasured
)
Observer = Callable[[Event], None]
