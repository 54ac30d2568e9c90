"""The final comparison: baselines and finalists measured in turn, round after round, so that drift hits them all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from amptune.measure.evaluator import Evaluator
from amptune.measure.outcome import Effort, Failure, Outcome
from amptune.policy.settings import Policy
from amptune.search.budget import Budget
from amptune.search.decision import Round, settled
from amptune.search.events import FinalMeasured, FinalsStarted, Observer

__all__ = ["MIN_ROUNDS", "compare"]

MIN_ROUNDS = 5
MAX_ROUNDS = 12
FINAL_EFFORT = Effort(warmup_s=1.0, measure_s=0.3, min_steps=4, time_limit_s=60.0)


def compare(
    evaluator: Evaluator,
    policies: Sequence[Policy],
    budget: Budget,
    *,
    baseline: Policy,
    failed: Mapping[Policy, Failure],
    seed: int,
    observer: Observer,
) -> Iterator[Round]:
    """Yields rounds in which each policy was measured once, in random order; one round at the least.

    Ends when the verdict is settled or the budget cannot hold another round. A policy that failed, in
    the search (`failed`) or here, is not measured again; its failure stands in the rounds that follow.
    """
    observer(FinalsStarted(policies=tuple(policies)))
    shuffle = random.Random(seed)  # noqa: S311  # an order of measuring, no secret
    rounds: list[Round] = []
    failures = dict(failed)
    longest_s = 0.0
    while len(rounds) < MAX_ROUNDS and (not rounds or budget.left_s > longest_s):
        if len(rounds) >= MIN_ROUNDS and settled(rounds, baseline):
            break
        before_s = budget.left_s
        outcomes: dict[Policy, Outcome] = {}
        for policy in shuffle.sample(list(policies), len(policies)):
            outcomes[policy] = failures.get(policy) or evaluator.measure(policy, FINAL_EFFORT)
            observer(FinalMeasured(round=len(rounds) + 1, policy=policy, outcome=outcomes[policy]))
        failures |= {policy: outcome for policy, outcome in outcomes.items() if isinstance(outcome, Failure)}
        rounds.append(outcomes)
        yield outcomes
        longest_s = max(longest_s, before_s - budget.left_s)
