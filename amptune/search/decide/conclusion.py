"""The conclusion from a verdict: the answer and its grounds in words, and what is shown beside it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from amptune.policy.settings import Policy
from amptune.search.decide.pareto import ParetoPoint, front_of, points_of
from amptune.search.gate.judgements import Judgements
from amptune.search.table.ablation import Ablated, ablated
from amptune.search.table.contenders import PROCESSES, Contender
from amptune.search.table.gains import counted, gain_in_words, goal_of
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import LIKELY, Ratio, chance_in_words
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict

__all__ = ["Conclusion"]

# With a smaller probability a policy that may be better is not named.
WORTH_NAMING = 0.75


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """A verdict with the trials and judgements behind it; `recipes` are the AMP recipes that it is compared with."""

    verdict: Verdict
    trials: tuple[Trial, ...]
    judgements: Judgements
    recipes: tuple[Policy, ...]

    @property
    def winner(self) -> Policy:
        """The answer, as it was measured: its batch size is None if it is the workload's own."""
        return self.verdict.winner.policy

    @property
    def baseline(self) -> Contender:
        return self.verdict.baseline

    @property
    def objective(self) -> Objective:
        """The objective that the policy was chosen by."""
        return self.verdict.objective

    @property
    def speedup(self) -> Ratio:
        """Samples per second under the policy over those of the baseline."""
        return self.verdict.speedup

    @property
    def gain(self) -> Ratio:
        """The gain by the objective: speedup, or peak memory or energy a sample, the baseline's over the policy's."""
        return self.verdict.gain

    @property
    def keeps_the_baseline(self) -> bool:
        return self.verdict.keeps_the_baseline

    @property
    def compares_nothing(self) -> bool:
        """True if nothing but the baseline was measured: then there is no answer yet."""
        return self.verdict.is_open

    @property
    def is_proven(self) -> bool:
        """True if the answer is confirmed, or claims nothing."""
        return self.keeps_the_baseline or self.verdict.confidence == "confirmed"

    @cached_property
    def finalists(self) -> tuple[Contender, ...]:
        """The policies that were measured more than once, baseline, winner, best rival and AMP recipes; best first."""
        named = {self.winner, self.baseline.policy, *self.recipes}
        named |= {self.verdict.leader.policy} if self.verdict.leader is not None else set()
        return tuple(one for one in self.verdict.contenders if one.rows > 1 or one.policy in named)

    @cached_property
    def amp_recipe(self) -> Contender | None:
        """The better of the AMP recipes; one that trains worse than FP32, or that failed, if there is no other."""
        tried = [one for one in self.verdict.contenders if one.policy in self.recipes]
        return min(tried, key=lambda one: (one.failure is not None, self.judgements.bars(one.policy)), default=None)

    @cached_property
    def ablation(self) -> tuple[Ablated, ...]:
        """What each setting of the answer buys."""
        return ablated(self.verdict, self.winner)

    @cached_property
    def points(self) -> tuple[ParetoPoint, ...]:
        """The trials that ran and were not rejected."""
        return points_of(self.trials, self.verdict, self.judgements)

    @cached_property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The points that no other policy beats in speed, memory and energy at once, the fastest first."""
        return front_of(self.points)

    def numerics_of(self, policy: Policy) -> str:
        """Returns the numerics gate's result for a policy, in words."""
        judged = self.judgements.known(policy)
        if self.judgements.bars(policy):
            return "rejected"
        if judged is not None and judged.passes:
            return f"passed, {judged.used:.0%} of what is allowed"
        return "as FP32" if self.judgements.passes(policy) else "not judged"

    @property
    def sentence(self) -> str:
        """The answer in words."""
        if self.compares_nothing:
            return "no answer yet: the budget was enough for the baseline only"
        if self.keeps_the_baseline:
            return f"keep what you have: no policy was shown {goal_of(self.objective)}"
        return f"{self.winner}: {gain_in_words(self.objective, self.gain, self.speedup)}"

    @property
    def grounds(self) -> str:
        """How sure the answer is, and the measurements that it rests on, in words."""
        verdict = self.verdict
        if self.compares_nothing:
            return "nothing to compare"
        if self.keeps_the_baseline:
            return f"{verdict.confidence}: {self._why_kept(len(verdict.contenders) - 1)}"
        processes = counted(max(1, verdict.gain.launches), "process")
        by = f"{counted(verdict.winner.rows, 'measurement')} in {processes}"
        return f"{verdict.confidence}, {chance_in_words(verdict.winner.chance)} sure: {by}"

    def _why_kept(self, others: int) -> str:
        """Returns that no other policy is better than the baseline, or why nobody knows yet."""
        verdict, leader = self.verdict, self.verdict.leader
        if verdict.confidence != "undecided":
            return f"none of {others} others is better" if others > 1 else "the only other policy is not better"
        if leader is None or leader.gain is None:
            return f"none of {others} others can win" if others > 1 else "the only other policy cannot win"
        if leader.chance >= LIKELY and leader.gain.launches < PROCESSES:
            return f"{leader.policy} was faster in one process alone, and it takes {PROCESSES} to tell"
        if leader.chance >= WORTH_NAMING:
            return f"{leader.policy} may be better ({chance_in_words(leader.chance)} sure)"
        if leader.rows == 1 and 0 < leader.merit < 1 and self.objective.name == "throughput":
            return f"not enough measurements; {leader.policy} took {1 / leader.merit:.2g} times as long in its only one"
        able = sum(one.may_win for one in verdict.contenders if one.policy != verdict.baseline.policy)
        named = f"one of {able} others" if able > 1 else "the only other policy that runs"
        return f"too few measurements to tell if {named} is better"
