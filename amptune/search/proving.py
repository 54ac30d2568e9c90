"""From finalists to a proven winner: the finals choose it, the ablation measures it anew beside its variants.

What is claimed of a winner comes from launches that had no part in choosing it: the fastest of several looks
faster than it is on the very measurements that made it the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from amptune.measure.evaluator import Evaluator
from amptune.measure.outcome import Failure, Outcome
from amptune.policy.settings import Policy
from amptune.search.ablation import variants_of
from amptune.search.budget import Budget
from amptune.search.decision import NARROW, Verdict, settled, verdict_of
from amptune.search.events import Observer
from amptune.search.finals import ROUNDS_PER_LAUNCH, Enough, compare
from amptune.search.ratios import ENOUGH_LAUNCHES, Round, launches_of, ratio_between

__all__ = ["Ablation", "Contest", "Proof", "prove"]

# Of the time behind the search, for the finals; a winner's ablation has the rest.
FINALS_SHARE = 0.5
# A claim that rests on the measurements that chose the policy needs an interval so many times as wide to exclude 1:
# 1.5 times, about Bonferroni's for six finalists, let too many through on a flat landscape (reports/replay.py --null).
UNCONFIRMED_DOUBT = 2.5

Eligible = Callable[[Policy], bool]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Who takes part and who may win: the baseline, and of the others those that the user's wishes allow."""

    baseline: Policy
    finalists: Sequence[Policy]
    eligible: Eligible
    variant_eligible: Eligible
    tried: Mapping[Policy, Outcome] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A candidate and its variants, measured beside the baseline; grows while they are."""

    candidate: Policy
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All comparisons of one tuning run, as far as they got: a decision can be made of it at any moment."""

    contest: Contest
    finals: list[Round] = field(default_factory=list)
    ablations: list[Ablation] = field(default_factory=list)

    @property
    def confirmed(self) -> Ablation | None:
        """The ablation of the most launches, the last of equals; None where none says as much as the finals."""
        said = [ablation for ablation in self.ablations if self._says_enough(ablation)]
        return max(reversed(said), key=lambda ablation: launches_of(ablation.rounds), default=None)

    @property
    def failed(self) -> Mapping[Policy, Failure]:
        """What failed in any comparison, and how."""
        rounds = [*self.finals, *(one for ablation in self.ablations for one in ablation.rounds)]
        return {p: outcome for one in rounds for p, outcome in one.outcomes.items() if isinstance(outcome, Failure)}

    def verdict(self) -> Verdict | None:
        """None where nothing was compared, or the baseline failed."""
        if self.confirmed is not None:
            return self.verdict_on(self.confirmed)
        return self.finals_verdict(doubt=UNCONFIRMED_DOUBT)

    def finals_verdict(self, *, doubt: float = 1.0) -> Verdict | None:
        """None where the finals have no interval yet; what failed since cannot win any more."""
        contest, failed = self.contest, self.failed
        rivals = {policy for one in self.finals for policy in one.outcomes} - failed.keys() - {contest.baseline}
        if not self.finals or (len(self.finals) < 2 and rivals):
            return None

        def may_win(policy: Policy) -> bool:
            return policy not in failed and contest.eligible(policy)

        return verdict_of(self.finals, contest.baseline, may_win, doubt=doubt)

    def may_win(self, ablation: Ablation) -> Eligible:
        """In an ablation: its candidate, the first one, and the variants that the user's wishes allow."""
        candidates = {self.ablations[0].candidate if self.ablations else ablation.candidate, ablation.candidate}
        return lambda policy: policy in candidates or self.contest.variant_eligible(policy)

    def _says_enough(self, ablation: Ablation) -> bool:
        launches = min(ENOUGH_LAUNCHES, launches_of(self.finals))
        enough = launches_of(ablation.rounds) >= launches and len(ablation.rounds) >= launches * ROUNDS_PER_LAUNCH
        return enough and not {ablation.candidate, self.contest.baseline} & self.failed.keys()

    def verdict_on(self, ablation: Ablation) -> Verdict | None:
        return verdict_of(ablation.rounds, self.contest.baseline, self.may_win(ablation))


def prove(evaluator: Evaluator, proof: Proof, budget: Budget, start_s: float, observer: Observer) -> None:
    """Compares until the winner is known, confirmed, and rid of what buys nothing; or the budget is spent."""
    contest = proof.contest
    ablation_s = (1 - FINALS_SHARE) * budget.left_s
    for one in compare(
        evaluator,
        contest.finalists,
        budget,
        stage="finals",
        baseline=contest.baseline,
        seed=contest.seed,
        observer=observer,
        tried=contest.tried,
        enough=_enough_finals(proof, budget, ablation_s),
        start_s=start_s,
        may_win=contest.eligible,
    ):
        proof.finals.append(one)
    for candidate in _candidates(proof, budget, start_s):
        ablation = Ablation(candidate=candidate)
        proof.ablations.append(ablation)
        for one in compare(
            evaluator,
            _beside(proof, candidate),
            budget,
            stage="ablation",
            baseline=contest.baseline,
            seed=contest.seed + len(proof.ablations),
            observer=observer,
            enough=_enough_ablation(proof, ablation),
            may_win=proof.may_win(ablation),
        ):
            ablation.rounds.append(one)


def _beside(proof: Proof, candidate: Policy) -> tuple[Policy, ...]:
    """Baseline, candidate and variants; and the first candidate, or what is dropped would add up unseen."""
    variants = (variant.policy for variant in variants_of(candidate))
    first = proof.ablations[0].candidate
    return tuple(dict.fromkeys([proof.contest.baseline, first, candidate, *variants]))


def _candidates(proof: Proof, budget: Budget, start_s: float) -> Iterator[Policy]:
    """The finals' winner, then each simpler one that its ablation prefers, while there is time to measure it."""
    verdict = proof.finals_verdict()
    if verdict is None or verdict.keeps_the_baseline or budget.left_s < start_s:
        return
    tried: set[Policy] = set()
    while verdict and not verdict.keeps_the_baseline and verdict.winner.policy not in tried:
        tried.add(verdict.winner.policy)
        before_s = budget.left_s
        yield verdict.winner.policy
        took_s, launches = before_s - budget.left_s, launches_of(proof.ablations[-1].rounds)
        if budget.left_s < ENOUGH_LAUNCHES * took_s / max(1, launches):
            return
        last = proof.ablations[-1]
        verdict = proof.finals_verdict() if last.candidate in proof.failed else proof.verdict_on(last)


def _enough_finals(proof: Proof, budget: Budget, ablation_s: float) -> Enough:
    """When all is known to ±1 %, or there is a winner and the time left is its ablation's."""
    contest = proof.contest

    def enough(rounds: Sequence[Round]) -> bool:
        if settled(rounds, contest.baseline):
            return True
        verdict = verdict_of(rounds, contest.baseline, contest.eligible)
        return verdict is None or (not verdict.keeps_the_baseline and budget.left_s < ablation_s)

    return enough


def _enough_ablation(proof: Proof, ablation: Ablation) -> Enough:
    """When all is known to ±1 %, or it is shown that a setting is to be dropped, and so another candidate's turn."""

    def enough(rounds: Sequence[Round]) -> bool:
        if settled(rounds, proof.contest.baseline):
            return True
        if launches_of(rounds) < ENOUGH_LAUNCHES:
            return False
        verdict = proof.verdict_on(Ablation(candidate=ablation.candidate, rounds=list(rounds)))
        if verdict is None:
            return True
        winner = verdict.winner.policy
        another = not verdict.keeps_the_baseline and winner != ablation.candidate
        return another and ratio_between(rounds, ablation.candidate, winner).half_width < NARROW

    return enough
