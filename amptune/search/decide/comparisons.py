"""The comparisons of one tuning run, stage by stage; a decision can be made from them at any time.

Claims about a winner come from launches that took no part in choosing it. The fastest of several policies looks faster
than it is on the very measurements that made it the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from amptune.measure.results.outcome import Failure, Outcome
from amptune.policy.settings import Policy
from amptune.search.decide.comparison import ROUNDS_PER_LAUNCH
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.ratio import (
    ENOUGH_LAUNCHES,
    Round,
    best_among,
    is_fast_enough,
    launches_of,
    ratio_between,
)
from amptune.search.table.verdict import Verdict, is_worth_a_change, verdict_of

__all__ = ["CandidateRounds", "ComparisonSetup", "Comparisons"]

# If a claim rests on the measurements that chose the policy, an interval this many times as wide must exclude 1. A
# factor of 1.5, about Bonferroni's for six finalists, lets too many through on a flat landscape (reports/replay.py
# --null).
UNCONFIRMED_DOUBT = 2.5

Eligible = Callable[[Policy], bool]


@dataclass(frozen=True, kw_only=True)
class ComparisonSetup:
    """The setup of a run's comparisons: the baseline, the finalists, the objective, and tests of who may win.

    `eligible` tests policies of the space, `variant_eligible` a policy with one setting less. `neighbours` returns the
    policies one step from another, the most promising first, allowed or not. `rejected` tests if a policy has failed
    the numerics gate so far: such policies are measured but do not win. `earlier` are rounds of former runs.
    """

    baseline: Policy
    finalists: Sequence[Policy]
    eligible: Eligible
    variant_eligible: Eligible
    neighbours: Callable[[Policy], Sequence[Policy]] = lambda _: ()
    tried: Mapping[Policy, Outcome] = field(default_factory=dict)
    rejected: Eligible = lambda _: False
    objective: Objective = THROUGHPUT
    seed: int = 0
    earlier: Sequence[Round] = ()

    def may_win(self, policy: Policy) -> bool:
        """Returns True if the wishes and the numerics gate let a policy of the space win."""
        return self.eligible(policy) and not self.rejected(policy)

    def may_refine(self, policy: Policy) -> bool:
        """Returns True if a policy may replace the winner."""
        wanted = self.eligible(policy) or self.variant_eligible(policy)
        return policy != self.baseline and wanted and not self.rejected(policy)


@dataclass(frozen=True, kw_only=True)
class CandidateRounds:
    """A candidate and the rounds measured with it and its neighbours or variants; `rounds` grows meanwhile."""

    candidate: Policy
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """All comparisons so far: the finals choose, refinements improve, ablations confirm."""

    setup: ComparisonSetup
    finals: list[Round] = field(default_factory=list)
    refinements: list[CandidateRounds] = field(default_factory=list)
    ablations: list[CandidateRounds] = field(default_factory=list)

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all comparisons; each comparison numbers its launches anew."""
        return [*self.finals, *(one for compared in (*self.refinements, *self.ablations) for one in compared.rounds)]

    @property
    def failed(self) -> Mapping[Policy, Failure]:
        """The policies that failed in any comparison, with their failures."""
        outcomes = (pair for one in self.rounds for pair in one.outcomes.items())
        return {policy: outcome for policy, outcome in outcomes if isinstance(outcome, Failure)}

    @property
    def is_out(self) -> Eligible:
        """A test of policies that cannot win any more because they failed or were rejected."""
        failed, rejected = self.failed, self.setup.rejected
        return lambda policy: policy in failed or rejected(policy)

    @property
    def candidate(self) -> Policy | None:
        """The policy that the stages so far prefer, to be measured next; None if that is the baseline."""
        last = self.ablations[-1] if self.ablations else None
        if last is not None and not self.is_out(last.candidate):
            verdict = self.verdict_on(last)
        else:
            verdict = self.finals_verdict()
        if verdict is None or verdict.keeps_the_baseline:
            return None
        refined = self._refined() if last is None else None
        return refined or verdict.winner.policy

    @property
    def runners_up(self) -> list[Policy]:
        """The finalists that may be better than the winner of the finals, the most likely first."""
        verdict = self.finals_verdict()
        if verdict is None:
            return []
        winner = verdict.winner.policy
        is_out, eligible = self.is_out, self.setup.eligible
        rivals = [p for p in self.finals[-1].outcomes if p != winner and eligible(p) and not is_out(p)]
        ratios = {policy: ratio_between(self.finals, policy, winner) for policy in rivals}
        return sorted((p for p in rivals if ratios[p].high > 1), key=lambda p: -ratios[p].value)

    def _refined(self) -> Policy | None:
        """Returns the best policy of the latest refinement whose best can still win; None if there is none."""
        is_out = self.is_out
        found = map(self._best_of, reversed(self.refinements))
        return next((best for best in found if not is_out(best)), None)

    def _best_of(self, compared: CandidateRounds) -> Policy:
        """Returns the best policy that may win and is shown to be better than the candidate; else the candidate."""
        rivals = {policy for one in compared.rounds for policy in one.outcomes} - self.failed.keys()
        allowed = sorted(filter(self.setup.may_refine, rivals - {compared.candidate}), key=str)
        fast = [policy for policy in allowed if is_fast_enough(compared.rounds, policy, self.setup.baseline)]
        best = best_among(compared.rounds, [compared.candidate, *fast])
        better = is_worth_a_change(ratio_between(compared.rounds, best, compared.candidate))
        return best if better else compared.candidate

    @property
    def confirmed(self) -> CandidateRounds | None:
        """The latest of the ablations with the most launches; None while none has as many as the finals."""
        said = [ablation for ablation in self.ablations if self._says_enough(ablation)]
        return max(reversed(said), key=lambda ablation: launches_of(ablation.rounds), default=None)

    def verdict(self) -> Verdict | None:
        """Returns the verdict so far; None if nothing was compared or the baseline failed."""
        confirmed = self.confirmed
        return self.finals_verdict(doubt=UNCONFIRMED_DOUBT) if confirmed is None else self.verdict_on(confirmed)

    def finals_verdict(self, *, doubt: float = 1.0) -> Verdict | None:
        """Returns the finals' verdict, without policies that failed since; None if the finals have no interval yet."""
        setup, is_out = self.setup, self.is_out
        rivals = {p for one in self.finals for p in one.outcomes if not is_out(p)} - {setup.baseline}
        if not self.finals or (len(self.finals) < 2 and rivals):
            return None

        def may_win(policy: Policy) -> bool:
            return not is_out(policy) and setup.eligible(policy)

        return verdict_of(self.finals, setup.baseline, may_win, doubt=doubt)

    def verdict_on(self, ablation: CandidateRounds) -> Verdict | None:
        """Returns an ablation's verdict; None if the baseline failed in it."""
        return verdict_of(ablation.rounds, self.setup.baseline, self.may_win(ablation))

    def candidates_beside(self, candidate: Policy) -> list[Policy]:
        """Returns the policies that an ablation measures besides variants: the candidate and those preferred before.

        The first candidate is included because small losses from dropped settings would add up unseen. The winner of
        the finals is included because otherwise nothing could undo a refinement that was only lucky.
        """
        verdict = self.finals_verdict()
        chosen = [] if verdict is None or verdict.keeps_the_baseline else [verdict.winner.policy]
        first = [ablation.candidate for ablation in self.ablations[:1]]
        return list(dict.fromkeys([candidate, *first, *chosen]))

    def may_win(self, ablation: CandidateRounds) -> Eligible:
        """Returns a test of who may win an ablation: its candidates and the variants that the user's wishes allow."""
        candidates = self.candidates_beside(ablation.candidate)
        wanted = self.setup.variant_eligible
        return lambda policy: (policy in candidates or wanted(policy)) and not self.setup.rejected(policy)

    def _says_enough(self, ablation: CandidateRounds) -> bool:
        launches = min(ENOUGH_LAUNCHES, launches_of(self.finals))
        enough = launches_of(ablation.rounds) >= launches and len(ablation.rounds) >= launches * ROUNDS_PER_LAUNCH
        return enough and not {ablation.candidate, self.setup.baseline} & self.failed.keys()
