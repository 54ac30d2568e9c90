"""The conclusion from a verdict: the answer, and what is shown beside it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import Policy
from amptune.search.decide.pareto import front_of
from amptune.search.gate.judgements import Judgements
from amptune.search.table.ablation import Ablated, ablated
from amptune.search.table.contenders import Contender
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Ratio
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict

__all__ = ["Conclusion"]


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
        """The gain that each setting of the answer adds."""
        return ablated(self.verdict, self.winner)

    @cached_property
    def points(self) -> tuple[Contender, ...]:
        """The policies that were tried, never failed and were not rejected by the numerics gate."""
        tried = {trial.policy for trial in self.trials}
        ran = (one for one in self.verdict.contenders if one.samples_per_s and one.policy in tried)
        return tuple(one for one in ran if not self.judgements.bars(one.policy))

    @cached_property
    def front(self) -> tuple[Contender, ...]:
        """The points that no other policy beats in speed, memory and energy at once, the fastest first."""
        return front_of(self.points)

    @property
    def trade_offs(self) -> tuple[Contender, ...]:
        """The front, the baseline and the winner, which need not be on it, in the order of contenders."""
        named = (self.verdict.baseline, self.verdict.winner)
        return tuple(one for one in self.verdict.contenders if one in self.front or one in named)

    @property
    def pareto(self) -> list[dict[str, Any]]:
        """The front as plain data; `judged` is set if the numerics gate passed it or had nothing to judge."""
        return [
            {"policy": policy_to_dict(one.policy), **one.axes, "judged": self.judgements.passes(one.policy)}
            for one in self.front
        ]

    def numerics_of(self, policy: Policy) -> str:
        """Returns the numerics gate's result for a policy, in words."""
        judged = self.judgements.known(policy)
        if self.judgements.bars(policy):
            return "rejected"
        if judged is not None and judged.passes:
            return f"passed, {judged.used:.0%} of what is allowed"
        return "as FP32" if self.judgements.passes(policy) else "not judged"
