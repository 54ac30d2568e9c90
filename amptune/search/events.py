"""What a tuning run tells while it runs; an observer is a function that takes these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from amptune.measure.outcome import Outcome
from amptune.measure.subject import Prepared
from amptune.policy.settings import Policy
from amptune.search.trial import Trial

__all__ = [
    "Event",
    "FinalMeasured",
    "FinalsStarted",
    "Observer",
    "SearchEnded",
    "SearchStarted",
    "TrialEnded",
    "TrialStarted",
]


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
class TrialEnded:
    trial: Trial
    best: Trial | None
    baseline: Trial | None
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEnded:
    """`because` says in words why no more policies are tried."""

    because: str
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalsStarted:
    policies: tuple[Policy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalMeasured:
    round: int
    policy: Policy
    outcome: Outcome


Event = SearchStarted | TrialStarted | TrialEnded | SearchEnded | FinalsStarted | FinalMeasured
Observer = Callable[[Event], None]
