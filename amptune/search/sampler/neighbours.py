"""The policies near another one that may be better. Pure."""

from __future__ import annotations

import math

from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.sampler.catalog import History
from amptune.search.sampler.surrogate import OUTLIER, Belief
from amptune.search.table.ablation import variants_of

__all__ = ["neighbours_of"]

# A single measurement may show only this share of a policy's speed, if another program used the machine meanwhile.
OUTLIER_SHARE = 0.6


def neighbours_of(policy: Policy, history: History, belief: Belief | None) -> list[Policy]:
    """Returns the policies one step from a policy that may be better: one setting less, or one knob changed.

    They are ordered by what they may reach, the highest score that would be no outlier, those outside the space first.
    Neither a low expectation nor a measurement that may be an outlier excludes a policy.
    """
    catalog = history.catalog
    simpler = [variant.policy for variant in variants_of(policy)]
    others = catalog.one_step_from(policy)
    near = [other for other in dict.fromkeys([*simpler, *others]) if not _is_hopeless(other, policy, history)]

    def reach(other: Policy) -> float:
        index = catalog.index.get(other)
        if belief is None or index is None:
            return math.inf
        return float(belief.mean[index] + OUTLIER * belief.deviation[index])

    return sorted(near, key=reach, reverse=True)


def _is_hopeless(policy: Policy, beside: Policy, history: History) -> bool:
    """Returns True if it failed, or was worse than an outlier explains."""
    trial, other = history.latest.get(policy), history.latest.get(beside)
    if trial is None or isinstance(trial.outcome, Failure):
        return trial is not None
    if history.yardstick.share_of_needed_speed(trial.outcome) < OUTLIER_SHARE:
        return True
    best = _plain_score(other.outcome, history) if other is not None else 0.0
    return _plain_score(trial.outcome, history) < OUTLIER_SHARE * best


def _plain_score(outcome: Outcome, history: History) -> float:
    """Returns the score without a penalty for low speed, as that is one measurement and may be an outlier."""
    return (history.objective.score(outcome) or 0.0) if isinstance(outcome, Measurement) else 0.0
