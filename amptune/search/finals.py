"""The comparison: contenders measured in turn, round after round, launch after launch, so that drift hits them all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from amptune.measure.evaluator import Evaluator
from amptune.measure.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.budget import Budget
from amptune.search.decision import settled
from amptune.search.events import ComparisonStarted, ContenderMeasured, Observer, Stage
from amptune.search.ratios import Round, fastest_of, launches_of, ratio_between

__all__ = ["MAX_LAUNCHES", "ROUNDS_PER_LAUNCH", "compare"]

# An outlier does not move the median of three; more launches tell more than more rounds in one.
ROUNDS_PER_LAUNCH = 3
MAX_LAUNCHES = 30
# Slower than this share of the best in all of this many looks, and it is not measured any more.
FAR_BEHIND = 0.75
FAR_BEHIND_LOOKS = 2
# After this many launches, one that is clearly slower than the fastest is not measured any more either: by so much,
# since the question is put again after each launch, and an interval that excludes 1 by a hair would often be luck.
LAUNCHES_TO_BEAT = 3
CLEARLY = 0.02
FINAL_EFFORT = Effort(warmup_s=2.0, measure_s=0.4, min_steps=6, precision=0.003)
SHORTEST_LIMIT_S, LONGEST_LIMIT_S = 10.0, 120.0
# A worker that dies or hangs once may have been an accident; running out of memory is not.
ACCIDENTS = ("crash", "timeout")
ATTEMPTS = 2

Enough = Callable[[Sequence[Round]], bool]
MayWin = Callable[[Policy], bool]


def compare(
    evaluator: Evaluator,
    policies: Sequence[Policy],
    budget: Budget,
    *,
    stage: Stage,
    baseline: Policy,
    seed: int,
    observer: Observer,
    tried: Mapping[Policy, Outcome] | None = None,
    enough: Enough | None = None,
    start_s: float = 0.0,
    may_win: MayWin = lambda _: True,
) -> Iterator[Round]:
    """Yields rounds in which each policy was measured once, in random order; one round at the least.

    Each launch starts a fresh process for every contender and holds three rounds. Launches go on until there are
    `enough` (by default, until every ratio is known to ±1 %) or the budget cannot hold another. `tried` is what
    became of the policies before. One that failed, there or here, is not measured again; one far behind, there
    and here, is left out of the rest: more launches for those that may win. The baseline always stays. Where the
    budget has not the `start_s` that a launch takes, the processes that run already do. One that may not win is
    measured beside the others, and drops none of them.
    """
    return _Comparison(evaluator, policies, budget, stage, baseline, seed, observer, tried or {}, may_win).rounds_until(
        enough or (lambda rounds: settled(rounds, baseline)), start_s
    )


class _Comparison:
    """One comparison under way: what was measured, and so what is still worth measuring."""

    def __init__(
        self,
        evaluator: Evaluator,
        policies: Sequence[Policy],
        budget: Budget,
        stage: Stage,
        baseline: Policy,
        seed: int,
        observer: Observer,
        tried: Mapping[Policy, Outcome],
        may_win: MayWin,
    ) -> None:
        self._evaluator = evaluator
        self._policies = tuple(policies)
        self._budget = budget
        self._stage = stage
        self._baseline = baseline
        self._observer = observer
        self._tried = tried
        self._eligible = may_win
        self._shuffle = random.Random(seed)  # noqa: S311  # an order of measuring, no secret
        self._rounds: list[Round] = []
        self._beaten: set[Policy] = set()
        self._failed = {policy for policy, outcome in tried.items() if isinstance(outcome, Failure)}

    def rounds_until(self, enough: Enough, start_s: float) -> Iterator[Round]:
        self._observer(ComparisonStarted(stage=self._stage, policies=self._policies))
        for launch in range(MAX_LAUNCHES):
            before_s = self._budget.left_s
            if launch > 0 or before_s > start_s:
                self._evaluator.launch(self._contenders())
            yield from self._launch(launch)
            self._drop_the_beaten()
            launch_s = max(start_s, before_s - self._budget.left_s)
            if enough(self._rounds) or self._budget.left_s < launch_s or not self._goes_on():
                return

    def _launch(self, launch: int) -> Iterator[Round]:
        """The rounds of one launch, as many as there is time for; the first of all in any case."""
        round_s = 0.0
        for _ in range(ROUNDS_PER_LAUNCH):
            if self._rounds and (self._budget.left_s < round_s or not self._goes_on()):
                return
            before_s = self._budget.left_s
            outcomes = self._outcomes(launch)
            if self._rounds and outcomes.keys() != set(self._contenders()):
                return  # the time ran out within the round, and half a round compares nothing
            self._failed |= {policy for policy, outcome in outcomes.items() if isinstance(outcome, Failure)}
            self._rounds.append(Round(launch=launch, outcomes=outcomes))
            yield self._rounds[-1]
            round_s = before_s - self._budget.left_s

    def _contenders(self) -> list[Policy]:
        """Those that may still win, and the baseline."""
        looks = [self._tried, *(one.outcomes for one in self._rounds)]
        return [
            policy
            for policy in self._policies
            if policy == self._baseline
            or not (policy in self._failed or policy in self._beaten or self._is_far_behind(policy, looks))
        ]

    def _drop_the_beaten(self) -> None:
        """Those shown to be slower than the fastest: what they would still be measured for is known."""
        if launches_of(self._rounds) < LAUNCHES_TO_BEAT:
            return
        contenders = self._contenders()
        fastest = fastest_of(self._rounds, [policy for policy in contenders if self._may_win(policy)])
        ratios = {policy: ratio_between(self._rounds, fastest, policy) for policy in contenders}
        self._beaten |= {policy for policy, ratio in ratios.items() if ratio.low > 1 + CLEARLY}

    def _outcomes(self, launch: int) -> dict[Policy, Outcome]:
        """Every contender measured once; those missing for which the time ran out."""
        outcomes: dict[Policy, Outcome] = {}
        if not self._rounds:  # what failed before stands in the comparison with its failure
            outcomes = {policy: self._tried[policy] for policy in self._policies if policy in self._failed}
        contenders = self._contenders()
        for policy in self._shuffle.sample(contenders, len(contenders)):
            outcome = self._measure(policy)
            if outcome is not None:
                outcomes[policy] = outcome
                self._observer(ContenderMeasured(stage=self._stage, launch=launch, policy=policy, outcome=outcome))
        return outcomes

    def _measure(self, policy: Policy) -> Outcome | None:
        """None where the budget and not the policy cut it short: that says nothing about the policy."""
        for attempt in range(ATTEMPTS):
            limit_s = min(LONGEST_LIMIT_S, max(SHORTEST_LIMIT_S, self._budget.left_s))
            outcome = self._evaluator.measure(policy, replace(FINAL_EFFORT, time_limit_s=limit_s))
            if not isinstance(outcome, Failure) or outcome.kind not in ACCIDENTS:
                return outcome
            if outcome.kind == "timeout" and limit_s < LONGEST_LIMIT_S:
                return None
            if attempt + 1 == ATTEMPTS or self._budget.left_s < SHORTEST_LIMIT_S:
                break
        return outcome

    def _may_win(self, policy: Policy) -> bool:
        return policy == self._baseline or self._eligible(policy)

    def _goes_on(self) -> bool:
        """Whether anything is left to compare the baseline with."""
        return self._baseline not in self._failed and len(self._contenders()) > 1

    def _is_far_behind(self, policy: Policy, looks: Sequence[Mapping[Policy, Outcome]]) -> bool:
        """Whether a policy lost every look by so much that no noise explains it."""
        lost = [
            outcome.samples_per_s < FAR_BEHIND * self._best(look)
            for look in looks
            if isinstance(outcome := look.get(policy), Measurement)
        ]
        return len(lost) >= FAR_BEHIND_LOOKS and all(lost)

    def _best(self, look: Mapping[Policy, Outcome]) -> float:
        """The speed of the fastest that may win."""
        speeds = (o.samples_per_s for p, o in look.items() if isinstance(o, Measurement) and self._may_win(p))
        return max(speeds, default=0.0)
