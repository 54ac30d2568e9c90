"""The stages that lead from finalists to a proven winner.

The finals choose it. If there is time, refinements look for something faster among the runners-up and one step away
from it. The ablation measures the result anew, beside the baseline and without one setting at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import Policy
from amptune.search.decide.comparison import Comparison, Enough
from amptune.search.decide.comparisons import CandidateRounds, Comparisons
from amptune.search.events import Observer
from amptune.search.plan.budget import ABLATION_SHARE, COLD_SHARE, FINALS_SHARE, Budget
from amptune.search.plan.compile_costs import cold_s
from amptune.search.table.ablation import variants_of
from amptune.search.table.ratio import ENOUGH_LAUNCHES, Round, is_fast_enough, launches_of, places_in, ratio_between
from amptune.search.table.verdict import NARROW, is_worth_a_change, settled, verdict_of

__all__ = ["compare_finalists"]

# At most this many neighbours are measured beside a candidate at once: each costs a process in every launch.
NEIGHBOURS = 4


def compare_finalists(
    evaluator: Evaluator,
    comparisons: Comparisons,
    budget: Budget,
    start_s: float,
    observer: Observer,
    rejects: Callable[[Policy], bool] = lambda _: False,
) -> None:
    """Compares until the winner is known, refined, confirmed, and free of useless settings; or the budget is spent.

    `rejects` judges the numerics of a policy that is about to win; the comparisons then know the result too.
    """
    stages = _Stages(evaluator, comparisons, budget, start_s, observer, rejects)
    ablation_s = ABLATION_SHARE * budget.left_s
    stages.finals((1 - FINALS_SHARE) * budget.left_s, ablation_s)
    stages.refine(ablation_s)
    stages.ablate()


@dataclass
class _Stages:
    """The stages of the comparisons; each continues from what the earlier ones found."""

    evaluator: Evaluator
    comparisons: Comparisons
    budget: Budget
    start_s: float
    observer: Observer
    rejects: Callable[[Policy], bool]
    # Seconds that one contender of a launch took in the finals.
    place_s: float = 0.0

    def finals(self, reserve_s: float, ablation_s: float) -> None:
        """Measures the finalists until their order is known, or only `reserve_s` is left.

        If there is time to refine the winner before `ablation_s` are left, it stops as soon as a winner can be told.
        """
        setup, before_s = self.comparisons.setup, self.budget.left_s

        def enough(rounds: Sequence[Round]) -> bool:
            if settled(rounds, setup.baseline):
                return True
            verdict = verdict_of(rounds, setup.baseline, setup.may_win)
            if verdict is None or verdict.keeps_the_baseline:
                return verdict is None
            launches = launches_of(rounds)
            refinement_s = ENOUGH_LAUNCHES * (before_s - self.budget.left_s) / launches
            ample = self.budget.left_s - ablation_s > refinement_s
            return (launches >= ENOUGH_LAUNCHES and ample) or self.budget.left_s < reserve_s

        comparison = Comparison(
            evaluator=self.evaluator,
            policies=setup.finalists,
            baseline=setup.baseline,
            budget=self.budget,
            stage="finals",
            observer=self.observer,
            objective=setup.objective,
            seed=setup.seed,
            tried=setup.tried,
            may_win=setup.may_win,
            start_s=self.start_s,
            reserve_s=reserve_s,
        )
        for one in comparison.rounds(enough):
            self.comparisons.finals.append(one)
        self.place_s = (before_s - self.budget.left_s) / max(1, places_in(self.comparisons.finals))

    def refine(self, reserve_s: float) -> None:
        """Measures policies that may be better beside the winner, and repeats with a better one, while there is time.

        First come the finalists that are not beaten, then the policies one step from the winner. If a speed is needed,
        the baseline runs beside them.
        """
        setup, runners_up = self.comparisons.setup, self.comparisons.runners_up
        budget = self.budget.less(reserve_s)
        seen = {policy for one in self.comparisons.finals for policy in one.outcomes} - set(runners_up)
        while (candidate := self._candidate()) is not None:
            near = dict.fromkeys([*runners_up, *setup.neighbours(candidate)])
            allowed = (policy for policy in near if policy not in seen and setup.may_refine(policy))
            new = [policy for policy in allowed if self._is_soon_compiled(policy)][:NEIGHBOURS]
            launch_s = (1 + len(new) + setup.objective.needs_speed) * self.place_s
            if not new or budget.left_s < ENOUGH_LAUNCHES * launch_s:
                return
            seen.update(new)
            compared = CandidateRounds(candidate=candidate)
            self.comparisons.refinements.append(compared)
            pacer = (setup.baseline,) if setup.objective.needs_speed else ()
            comparison = Comparison(
                evaluator=self.evaluator,
                policies=(candidate, *new, *pacer),
                baseline=candidate,
                budget=budget,
                stage="refinement",
                observer=self.observer,
                objective=setup.objective,
                pacer=setup.baseline,
                kept=pacer,
                seed=setup.seed - len(self.comparisons.refinements),
            )
            for one in comparison.rounds(_enough_refinement(compared, setup.baseline)):
                compared.rounds.append(one)

    def ablate(self) -> None:
        """Measures the winner and its variants anew, and repeats this with a variant that is preferred."""
        setup = self.comparisons.setup
        for candidate in self._candidates():
            ablation = CandidateRounds(candidate=candidate)
            self.comparisons.ablations.append(ablation)
            variants = filter(self._is_soon_compiled, (variant.policy for variant in variants_of(candidate)))
            beside = dict.fromkeys([setup.baseline, *self.comparisons.candidates_beside(candidate), *variants])
            comparison = Comparison(
                evaluator=self.evaluator,
                policies=tuple(beside),
                baseline=setup.baseline,
                budget=self.budget,
                stage="ablation",
                observer=self.observer,
                objective=setup.objective,
                seed=setup.seed + len(self.comparisons.ablations),
                kept=(candidate,),
                may_win=self.comparisons.may_win(ablation),
            )
            for one in comparison.rounds(self._enough_ablation(ablation)):
                ablation.rounds.append(one)

    def _is_soon_compiled(self, policy: Policy) -> bool:
        """Returns True if the policy's graph is in a cache, or compiling it takes a small part of the time left."""
        return cold_s(policy, self.comparisons.setup.tried) <= COLD_SHARE * self.budget.left_s

    def _candidates(self) -> Iterator[Policy]:
        """Yields the winner so far, then each simpler one that its ablation prefers, while there is time for it."""
        comparisons, tried = self.comparisons, set[Policy]()
        candidate = self._candidate() if self.budget.left_s >= self.start_s else None
        while candidate is not None and candidate not in tried:
            tried.add(candidate)
            before_s = self.budget.left_s
            yield candidate
            last = comparisons.ablations[-1]
            launch_s = (before_s - self.budget.left_s) / max(1, launches_of(last.rounds))
            if self.budget.left_s < ENOUGH_LAUNCHES * launch_s:
                return
            candidate = self._candidate()

    def _candidate(self) -> Policy | None:
        """Returns the candidate of the comparisons once it passed the numerics gate, or None."""
        while (candidate := self.comparisons.candidate) is not None and self.rejects(candidate):
            pass  # the comparisons have another one now
        return candidate

    def _enough_ablation(self, ablation: CandidateRounds) -> Enough:
        """Returns a test of enough rounds: all is known to ±1 %, or a setting is shown to be dropped."""
        baseline = self.comparisons.setup.baseline

        def enough(rounds: Sequence[Round]) -> bool:
            if settled(rounds, baseline):
                return True
            if launches_of(rounds) < ENOUGH_LAUNCHES:
                return False
            verdict = self.comparisons.verdict_on(CandidateRounds(candidate=ablation.candidate, rounds=list(rounds)))
            if verdict is None:
                return True
            winner = verdict.winner.policy
            another = not verdict.keeps_the_baseline and winner != ablation.candidate
            ratio = ratio_between(rounds, winner, ablation.candidate)
            return another and (ratio.low > 1 or ratio.half_width < NARROW)

        return enough


def _enough_refinement(compared: CandidateRounds, baseline: Policy) -> Enough:
    """Returns a test of enough rounds: something better was found, or cannot exist."""

    def enough(rounds: Sequence[Round]) -> bool:
        outcomes = [pair for one in rounds for pair in one.outcomes.items()]
        failed = {policy for policy, outcome in outcomes if isinstance(outcome, Failure)}
        rivals = {policy for policy, _ in outcomes} - failed - {compared.candidate, baseline}
        fast = {policy for policy in rivals if is_fast_enough(rounds, policy, baseline)}
        ratios = {rival: ratio_between(rounds, rival, compared.candidate) for rival in fast}
        none = all(ratio.value <= 1 or ratio.high <= 1 + NARROW for ratio in ratios.values())
        found = any(
            is_worth_a_change(ratio) and is_fast_enough(rounds, rival, baseline, surely=True)
            for rival, ratio in ratios.items()
        )
        return found or (none and launches_of(rounds) >= ENOUGH_LAUNCHES)

    return enough
