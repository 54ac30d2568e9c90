"""The comparison: contenders measured in turn, round after round, launch after launch, so that drift hits them all."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from amptune.measure.evaluator import Evaluator
from amptune.measure.outcome import ENERGY_S, Effort, Failure, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.budget import Budget
from amptune.search.decision import settled
from amptune.search.events import ComparisonStarted, ContenderMeasured, Observer, Stage
from amptune.search.objective import THROUGHPUT, Objective, Yardstick
from amptune.search.ratios import (
    ENOUGH_LAUNCHES,
    LAUNCHES_DIFFER,
    Round,
    best_among,
    is_fast_enough,
    launches_of,
    ratio_between,
    spread_within_launches,
)

__all__ = ["MAX_LAUNCHES", "ROUNDS_PER_LAUNCH", "Comparison", "Enough"]

# An outlier does not move the median of three, so a launch holds no fewer rounds; as a rule more launches tell more.
ROUNDS_PER_LAUNCH = 3
MOST_ROUNDS_PER_LAUNCH = 12
MAX_LAUNCHES = 30
# Worse than this share of the best in all of this many looks, and it is not measured any more.
FAR_BEHIND = 0.75
FAR_BEHIND_LOOKS = 2
# Where a speed is needed, the best puts others far behind only if it is so many times as fast as that in the same look.
SURELY_FAST = 1.05
# One that is clearly worse than the best is not measured any more either, by so much: the question is put again
# after each launch, and an interval that excludes 1 by a hair would often be luck. A few launches may all be unlucky.
CLEARLY, CLEARLY_IN_FEW_LAUNCHES = 0.02, 0.10
FINAL_EFFORT = Effort(warmup_s=2.0, measure_s=0.4, min_steps=6, precision=0.003, energy_s=ENERGY_S)
SHORTEST_LIMIT_S, LONGEST_LIMIT_S = 10.0, 120.0
SHORTEST_ROUND_S = 1e-3
# A worker that dies or hangs once may have been an accident; running out of memory is not.
ACCIDENTS = ("crash", "timeout")
ATTEMPTS = 2

Enough = Callable[[Sequence[Round]], bool]


@dataclass(kw_only=True)
class Comparison:
    """Policies measured against each other within a budget.

    `tried` is what became of the policies before. One that failed, there or here, is not measured again; one far
    behind, there and here, or clearly beaten, is left out of the rest: more launches for those that may win. The
    baseline always stays, and so does what is `kept`, being what the comparison is about. One that may not win is
    measured beside the others, and drops none of them; nor does one that may be too slow for the `objective`. The
    speed needed is that of the `pacer`, by default the baseline; one that is too slow is beaten.

    Each launch takes about `start_s` seconds to start. Of the budget, `reserve_s` is better left for what comes next.
    """

    evaluator: Evaluator
    policies: Sequence[Policy]
    baseline: Policy
    budget: Budget
    stage: Stage
    observer: Observer
    objective: Objective = THROUGHPUT
    pacer: Policy | None = None
    seed: int = 0
    kept: Collection[Policy] = ()
    tried: Mapping[Policy, Outcome] = field(default_factory=dict)
    may_win: Callable[[Policy], bool] = lambda _: True
    start_s: float = 0.0
    reserve_s: float = 0.0

    _rounds: list[Round] = field(default_factory=list, init=False)
    _beaten: set[Policy] = field(default_factory=set, init=False)
    _far_behind: dict[Policy, list[bool]] = field(default_factory=lambda: defaultdict(list), init=False)
    _failed: set[Policy] = field(init=False)
    _launch_s: float = field(init=False)
    _shuffle: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._failed = {policy for policy, outcome in self.tried.items() if isinstance(outcome, Failure)}
        self._shuffle = random.Random(self.seed)  # noqa: S311  # an order of measuring, no secret
        self._launch_s = self.start_s
        self._look_at(self.tried)

    def rounds(self, enough: Enough | None = None) -> Iterator[Round]:
        """Yields rounds in which each policy was measured once, in random order; one round at the least.

        Each launch starts a fresh process for every contender. Launches go on until there are `enough` (by default,
        until every ratio is known to ±1 %) or the budget cannot hold another. Where it cannot hold the first one, the
        processes that run already do.
        """
        enough = enough or (lambda rounds: settled(rounds, self.baseline))
        policies, left_s = tuple(self.policies), self.budget.left_s
        self.observer(ComparisonStarted(stage=self.stage, policies=policies, left_s=left_s))
        for launch in range(MAX_LAUNCHES):
            before_s = self.budget.left_s
            if launch > 0 or before_s > self.start_s:
                self.evaluator.launch(self._contenders())
            yield from self._launch(launch, before_s)
            self._drop_the_beaten()
            if enough(self._rounds) or self.budget.left_s < self._launch_s or not self._goes_on():
                return

    def _launch(self, launch: int, before_s: float) -> Iterator[Round]:
        """The rounds of one launch, as many as are worth it and there is time for; the first of all in any case."""
        start_s = round_s = 0.0
        done = 0
        while done < self._rounds_worth(done, start_s, round_s):
            if self._rounds and (self.budget.left_s < round_s or not self._goes_on()):
                return
            round_began_s = self.budget.left_s
            outcomes = self._outcomes(launch)
            if self._rounds and outcomes.keys() != set(self._contenders()):
                return  # the time ran out within the round, and half a round compares nothing
            self._failed |= {policy for policy, outcome in outcomes.items() if isinstance(outcome, Failure)}
            self._look_at(outcomes)
            self._rounds.append(Round(launch=launch, outcomes=outcomes, objective=self.objective))
            yield self._rounds[-1]
            round_s = round_began_s - self.budget.left_s
            start_s = start_s or before_s - self.budget.left_s
            done += 1
            self._launch_s = max(self.start_s, start_s + (ROUNDS_PER_LAUNCH - 1) * round_s)

    def _rounds_worth(self, done: int, start_s: float, round_s: float) -> int:
        """How many rounds a launch should hold that has `done` some, the first `start_s` after its start.

        The share that gives the narrowest interval for the time (the optimum allocation of two-stage sampling: Cochran,
        "Sampling Techniques", 1977, section 10.6), as far as it leaves time for enough launches.
        """
        if not done:
            return ROUNDS_PER_LAUNCH
        round_s = max(round_s, SHORTEST_ROUND_S)
        costs, spread = max(0.0, start_s - round_s) / round_s, spread_within_launches(self._rounds, self.baseline)
        launches_to_come = max(0, ENOUGH_LAUNCHES - launches_of(self._rounds))
        time_s = self.budget.left_s - self.reserve_s + done * round_s - launches_to_come * (start_s - round_s)
        in_time = time_s / round_s / (1 + launches_to_come)
        best = math.sqrt(costs) * spread / LAUNCHES_DIFFER
        return max(ROUNDS_PER_LAUNCH, int(min(best, in_time, MOST_ROUNDS_PER_LAUNCH)))

    def _contenders(self) -> list[Policy]:
        """Those that may still win, and the baseline."""
        return [policy for policy in self.policies if policy == self.baseline or not self._is_out(policy)]

    def _is_out(self, policy: Policy) -> bool:
        looks = self._far_behind[policy]
        hopeless = len(looks) >= FAR_BEHIND_LOOKS and all(looks)
        return policy in self._failed or (policy not in self.kept and (hopeless or policy in self._beaten))

    def _look_at(self, outcomes: Mapping[Policy, Outcome]) -> None:
        """Notes who is far behind the best that may win."""
        pace = outcomes.get(self.pacer or self.baseline)
        yardstick = Yardstick(self.objective, pace if isinstance(pace, Measurement) else None)
        measured = {policy: one for policy, one in outcomes.items() if isinstance(one, Measurement)}
        scores = {policy: yardstick.score(one) or 0.0 for policy, one in measured.items()}
        least = SURELY_FAST if self.objective.needs_speed else 0.0
        sure = [policy for policy, one in measured.items() if yardstick.share_of_needed_speed(one) >= least]
        best = max((scores[policy] for policy in sure if self._is_eligible(policy)), default=0.0)
        for policy, score in scores.items():
            self._far_behind[policy].append(score < FAR_BEHIND * best)

    def _drop_the_beaten(self) -> None:
        """Those shown to be worse than the best, or too slow: what they would still be measured for is known."""
        contenders, pacer = self._contenders(), self.pacer or self.baseline
        clearly = CLEARLY if launches_of(self._rounds) >= ENOUGH_LAUNCHES else CLEARLY_IN_FEW_LAUNCHES
        eligible = [
            p for p in contenders if self._is_eligible(p) and is_fast_enough(self._rounds, p, pacer, surely=True)
        ]
        if eligible:
            best = best_among(self._rounds, eligible)
            ratios = {policy: ratio_between(self._rounds, best, policy) for policy in contenders}
            self._beaten |= {policy for policy, ratio in ratios.items() if ratio.shows_more_than(1 + clearly)}
        if self.objective.needs_speed:
            needed = (1 - clearly) * self.objective.least_speed
            speeds = {p: ratio_between(self._rounds, p, pacer, by=THROUGHPUT) for p in contenders}
            self._beaten |= {policy for policy, speed in speeds.items() if speed.launches and speed.high < needed}

    def _outcomes(self, launch: int) -> dict[Policy, Outcome]:
        """Every contender measured once; those missing for which the time ran out."""
        outcomes: dict[Policy, Outcome] = {}
        if not self._rounds:  # what failed before stands in the comparison with its failure
            outcomes = {policy: self.tried[policy] for policy in self.policies if policy in self._failed}
        contenders = self._contenders()
        for policy in self._shuffle.sample(contenders, len(contenders)):
            outcome = self._measure(policy)
            if outcome is not None:
                outcomes[policy] = outcome
                self.observer(ContenderMeasured(stage=self.stage, launch=launch, policy=policy, outcome=outcome))
        return outcomes

    def _measure(self, policy: Policy) -> Outcome | None:
        """None where the budget and not the policy cut it short: that says nothing about the policy."""
        for attempt in range(ATTEMPTS):
            limit_s = min(LONGEST_LIMIT_S, max(SHORTEST_LIMIT_S, self.budget.left_s))
            effort = self.objective.effort(replace(FINAL_EFFORT, time_limit_s=limit_s))
            outcome = self.evaluator.measure(policy, effort)
            if not isinstance(outcome, Failure) or outcome.kind not in ACCIDENTS:
                return outcome
            if outcome.kind == "timeout" and limit_s < LONGEST_LIMIT_S:
                return None
            if attempt + 1 == ATTEMPTS or self.budget.left_s < SHORTEST_LIMIT_S:
                break
        return outcome

    def _is_eligible(self, policy: Policy) -> bool:
        return policy == self.baseline or self.may_win(policy)

    def _goes_on(self) -> bool:
        """Whether anything is left to compare the baseline with."""
        return self.baseline not in self._failed and len(self._contenders()) > 1
