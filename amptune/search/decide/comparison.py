"""The comparison: contenders are measured in turn, in rounds and launches, so that drift affects all of them alike."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import ENERGY_S, Effort, Failure, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.events import ComparisonStarted, ContenderMeasured, Observer, Stage
from amptune.search.plan.budget import Budget
from amptune.search.table.objective import THROUGHPUT, Objective, Yardstick
from amptune.search.table.ratio import (
    ENOUGH_LAUNCHES,
    LAUNCHES_DIFFER,
    Round,
    best_among,
    is_fast_enough,
    launches_of,
    ratio_between,
    spread_within_launches,
)
from amptune.search.table.verdict import settled

__all__ = ["MAX_LAUNCHES", "ROUNDS_PER_LAUNCH", "Comparison", "Enough"]

# One outlier does not move the median of three, so a launch has at least three rounds. More launches usually tell more
# than more rounds.
ROUNDS_PER_LAUNCH = 3
MOST_ROUNDS_PER_LAUNCH = 12
MAX_LAUNCHES = 30
# A policy below this share of the best score in all its looks, at least this many, is not measured any more.
FAR_BEHIND = 0.75
FAR_BEHIND_LOOKS = 2
# If a speed is needed, only a policy with this many times that speed, in the same look, can put others far behind.
SURELY_FAST = 1.05
# A policy that is shown to be worse than the best by this margin is not measured any more either. The margin is there
# because this is tested after each launch, and an interval that just excludes 1 would often be luck. It is larger with
# few launches, as all of them may be unlucky.
CLEARLY, CLEARLY_IN_FEW_LAUNCHES = 0.02, 0.10
FINAL_EFFORT = Effort(warmup_s=2.0, measure_s=0.4, min_steps=6, precision=0.003, energy_s=ENERGY_S)
SHORTEST_LIMIT_S, LONGEST_LIMIT_S = 10.0, 120.0
SHORTEST_ROUND_S = 1e-3
# A worker that dies or hangs once may be an accident; running out of memory is not.
ACCIDENTS = ("crash", "timeout")
ATTEMPTS = 2

Enough = Callable[[Sequence[Round]], bool]


@dataclass(kw_only=True)
class Comparison:
    """A comparison of policies with each other, within a budget.

    `tried` holds the earlier outcomes of the policies. A policy that failed, earlier or here, is not measured again. A
    policy that is far behind, earlier and here, or clearly beaten, is dropped, so that those that may win get more
    launches. The baseline always stays, and so do the `kept` policies, which the comparison is about. A policy that may
    not win, or may be too slow for the `objective`, is measured but does not cause others to be dropped. The speed
    needed is relative to the `pacer`, by default the baseline; a policy that is too slow is beaten.

    Each launch takes about `start_s` seconds to start. `reserve_s` of the budget should be left for what comes next.
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
        """Yields rounds in which each policy was measured once, in random order; at least one round.

        Each launch starts a fresh process for every contender. Launches go on until the rounds are `enough` (by
        default, until every ratio is known to ±1 %) or the budget is too short for another launch. If it is too short
        for the first one, the processes that already run are used.
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
        """Yields the rounds of one launch, as many as are useful and fit the time; the very first one always runs."""
        start_s = round_s = 0.0
        done = 0
        while done < self._rounds_worth(done, start_s, round_s):
            if self._rounds and (self.budget.left_s < round_s or not self._goes_on()):
                return
            round_began_s = self.budget.left_s
            outcomes = self._outcomes(launch)
            if self._rounds and outcomes.keys() != set(self._contenders()):
                return  # the time ran out within the round; an incomplete round compares nothing
            self._failed |= {policy for policy, outcome in outcomes.items() if isinstance(outcome, Failure)}
            self._look_at(outcomes)
            self._rounds.append(Round(launch=launch, outcomes=outcomes, objective=self.objective))
            yield self._rounds[-1]
            round_s = round_began_s - self.budget.left_s
            start_s = start_s or before_s - self.budget.left_s
            done += 1
            self._launch_s = max(self.start_s, start_s + (ROUNDS_PER_LAUNCH - 1) * round_s)

    def _rounds_worth(self, done: int, start_s: float, round_s: float) -> int:
        """Returns how many rounds a launch should have; `done` are over, the first `start_s` after the launch began.

        The number gives the narrowest interval for the time (the optimum allocation of two-stage sampling: Cochran,
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
        """Returns the policies that are still measured, the baseline included."""
        return [policy for policy in self.policies if policy == self.baseline or not self._is_out(policy)]

    def _is_out(self, policy: Policy) -> bool:
        looks = self._far_behind[policy]
        hopeless = len(looks) >= FAR_BEHIND_LOOKS and all(looks)
        return policy in self._failed or (policy not in self.kept and (hopeless or policy in self._beaten))

    def _look_at(self, outcomes: Mapping[Policy, Outcome]) -> None:
        """Notes which policies are far behind the best one that may win."""
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
        """Drops policies shown to be worse than the best, or too slow: more measurements would not change that."""
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
        """Returns each contender measured once; contenders for which the time ran out are missing."""
        outcomes: dict[Policy, Outcome] = {}
        if not self._rounds:  # policies that failed before enter the comparison with their failure
            outcomes = {policy: self.tried[policy] for policy in self.policies if policy in self._failed}
        contenders = self._contenders()
        for policy in self._shuffle.sample(contenders, len(contenders)):
            outcome = self._measure(policy)
            if outcome is not None:
                outcomes[policy] = outcome
                self.observer(ContenderMeasured(stage=self.stage, launch=launch, policy=policy, outcome=outcome))
        return outcomes

    def _measure(self, policy: Policy) -> Outcome | None:
        """Returns None if the budget, not the policy, cut the measurement short: that says nothing about the policy."""
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
        """Returns whether the baseline runs and another policy is left to compare it with."""
        return self.baseline not in self._failed and len(self._contenders()) > 1
