"""amptune's own proposals: the policy that promises the most for its time, from the trials so far. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from amptune.policy.settings import Policy
from amptune.search.sampler.catalog import History
from amptune.search.sampler.surrogate import Belief
from amptune.search.table.improvement import expected_improvement

__all__ = ["Proposal", "optimistic", "proposals"]

# A score this many standard deviations above its expectation would be no outlier.
OPTIMISTIC = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A policy to measure next, and what it promises. Before two scores are known, all may be infinitely good."""

    policy: Policy
    gain: float
    """The expected improvement over the best policy, on the logarithm of the score."""
    optimistic: float
    """The highest logarithm of its score that would be no outlier."""


def proposals(
    history: History,
    besides: Collection[Policy],
    seed: int,
    *,
    seconds: Callable[[Policy], float] | None = None,
    running: Collection[Policy] = (),
) -> Proposal | None:
    """Returns the policy with the most gain per second that is neither measured, too large nor `besides`; None if none.

    Those that are `running` elsewhere are believed to turn out as expected. Without `seconds`, all trials cost the
    same.
    """
    catalog = history.catalog
    taken = {catalog.index[one] for one in (*history.latest, *besides, *running) if one in catalog.index}
    free = [index for index in range(len(catalog.policies)) if index not in taken and index not in history.too_large]
    if not free:
        return None
    begun = sorted(catalog.index[one] for one in running if one in catalog.index)
    belief = history.belief_with(begun) if begun else history.belief
    if belief is None:
        drawn = random.Random(f"{seed} {len(history.trials)} {begun}").choice(free)  # noqa: S311  # no secret
        policy = catalog.policies[drawn]
        return Proposal(policy=policy, gain=math.inf, optimistic=math.inf)
    best = max(belief.mean[index] for index, score in history.scores.items() if score is not None)
    gains = expected_improvement(belief.mean[free] - best, belief.deviation[free])
    costs = [seconds(catalog.policies[index]) if seconds else 1.0 for index in free]
    chosen = int((gains / costs).argmax())
    index, gain = free[chosen], float(gains[chosen])
    return Proposal(policy=catalog.policies[index], gain=gain, optimistic=_reach(belief, index))


def optimistic(history: History, policy: Policy) -> float | None:
    """Returns the highest logarithm of a policy's score that would be no outlier.

    Returns None for a policy outside the catalog, and before two scores are known.
    """
    index, belief = history.catalog.index.get(policy), history.belief
    return None if index is None or belief is None else _reach(belief, index)


def _reach(belief: Belief, index: int) -> float:
    return float(belief.mean[index] + OPTIMISTIC * belief.deviation[index])
