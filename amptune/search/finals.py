"""The final comparison: baselines and finalists measured in turn, round after round, so that drift hits them all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from amptune.measure.evaluator import Evaluator
from amptune.measure.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.budget import Budget
from amptune.search.decision import Round, settled
from amptune.search.events import FinalMeasured, FinalsStarted, Observer

__all__ = ["MIN_ROUNDS", "compare"]

MIN_ROUNDS = 5
MAX_ROUNDS = 12
# Slower than this share of the best in this many rounds, and it is not measured in the rest.
FAR_BEHIND = 0.75
FAR_BEHIND_ROUNDS = 2
FINAL_EFFORT = Effort(warmup_s=1.0, measure_s=0.3, min_steps=4)
SHORTEST_LIMIT_S, LONGEST_LIMIT_S = 10.0, 120.0
# A worker that dies or hangs once may have been an accident; running out of memory is not.
ACCIDENTS = ("crash", "timeout")


def compare(
    evaluator: Evaluator,
    policies: Sequence[Policy],
    budget: Budget,
    *,
    baseline: Policy,
    tried: Round,
    seed: int,
    observer: Observer,
) -> Iterator[Round]:
    """Yields rounds in which each policy was measured once, in random order; one round at the least.

    Ends when the verdict is settled or the budget cannot hold another round. `tried` is what became of the
    policies in the search. One that failed, there or here, is not measured again; its failure stands in the
    rounds that follow. One far behind, there and here, is left out of the rest: more rounds for those that may
    win.
    """
    observer(FinalsStarted(policies=tuple(policies)))
    shuffle = random.Random(seed)  # noqa: S311  # an order of measuring, no secret
    rounds: list[Round] = []
    failures = {policy: outcome for policy, outcome in tried.items() if isinstance(outcome, Failure)}
    last_s = 0.0
    while len(rounds) < MAX_ROUNDS and (not rounds or budget.left_s > last_s):
        if len(rounds) >= MIN_ROUNDS and settled(rounds, baseline):
            break
        before_s = budget.left_s
        outcomes: dict[Policy, Outcome] = {}
        contenders = [p for p in policies if p == baseline or not _is_far_behind(p, [tried, *rounds])]
        for policy in shuffle.sample(contenders, len(contenders)):
            outcomes[policy] = failures.get(policy) or _measure(evaluator, policy, budget)
            observer(FinalMeasured(round=len(rounds) + 1, policy=policy, outcome=outcomes[policy]))
        failures |= {policy: outcome for policy, outcome in outcomes.items() if isinstance(outcome, Failure)}
        rounds.append(outcomes)
        yield outcomes
        last_s = before_s - budget.left_s


def _measure(evaluator: Evaluator, policy: Policy, budget: Budget) -> Outcome:
    limit_s = min(LONGEST_LIMIT_S, max(SHORTEST_LIMIT_S, budget.left_s))
    outcome = evaluator.measure(policy, replace(FINAL_EFFORT, time_limit_s=limit_s))
    if isinstance(outcome, Failure) and outcome.kind in ACCIDENTS and budget.left_s > SHORTEST_LIMIT_S:
        outcome = evaluator.measure(policy, replace(FINAL_EFFORT, time_limit_s=max(SHORTEST_LIMIT_S, budget.left_s)))
    return outcome


def _is_far_behind(policy: Policy, rounds: Sequence[Round]) -> bool:
    """Whether a policy lost every round by so much that no noise explains it."""
    behind = [outcome.samples_per_s < FAR_BEHIND * _best(r) for r in rounds if (outcome := _measured(policy, r))]
    return len(behind) >= FAR_BEHIND_ROUNDS and all(behind)


def _measured(policy: Policy, final_round: Round) -> Measurement | None:
    outcome = final_round.get(policy)
    return outcome if isinstance(outcome, Measurement) else None


def _best(final_round: Round) -> float:
    return max(outcome.samples_per_s for outcome in final_round.values() if isinstance(outcome, Measurement))
