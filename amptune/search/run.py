"""A tuning run in progress: all that is known so far, from which a decision can be made at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.batch_size.batch_sizes import NO_SIZES, BatchSizes, batch_sizes_for
from amptune.search.decide.comparison import ROUNDS_PER_LAUNCH
from amptune.search.decide.comparisons import Comparisons, ComparisonSetup
from amptune.search.decide.conclusion import decide
from amptune.search.decide.decision import Decision
from amptune.search.decide.samples import read_comparisons
from amptune.search.events import GroundworkStarted, Observer
from amptune.search.gate.judge import Judge
from amptune.search.groundwork import check_precision, timed_ladder
from amptune.search.plan.budget import FINALS_SHARE, graph_judgement_s
from amptune.search.plan.compile_costs import compiled_s
from amptune.search.request import TuningRequest
from amptune.search.sampler.records import TuningRecord
from amptune.search.sampler.study import Study, open_study
from amptune.search.space.candidates import Candidates, candidates_for
from amptune.search.table.ratio import ENOUGH_LAUNCHES, Round

__all__ = ["FINALISTS", "TuningRun"]

# The fastest trials enter the finals: as many as time allows enough launches of, within these bounds. With seven
# contenders 70 s were enough for one round, which tells nothing (SE-ResNeXt50 on a slow host of an H200).
FEWEST_FINALISTS, FINALISTS, MOST_FINALISTS = 3, 4, 8
# The numerics of this many finalists are judged ahead: a fast unsound one would make sound ones look beaten.
JUDGED_AHEAD = 2
# The gate compiles a graph anew for its batches, with dropout twice, in this many times the seconds of compiling for
# training (BERT-base on an H200: 31 s instead of 27).
GRAPH_TIMES = 1.3
# Seconds beyond the budget for judging the winner.
GRACE_S = 8.0


@dataclass
class TuningRun:
    """A tuning run in progress, from which a decision can be made at any moment.

    `findings` are those from before the search.
    """

    request: TuningRequest
    prepared: Prepared
    candidates: Candidates
    judge: Judge
    findings: tuple[Finding, ...] = ()
    sizes: BatchSizes = NO_SIZES
    comparisons: Comparisons | None = None

    @cached_property
    def study(self) -> Study:
        """The study, opened at first use: after the space is narrowed, or when that is interrupted."""
        candidates = self.candidates
        name, space, stored = candidates.study_name, candidates.space, candidates.stored
        study = open_study(
            self.request.study,
            name,
            space,
            candidates.policy_of,
            seed=self.request.seed,
            stored=stored,
            objective=self.request.objective,
            baseline=candidates.baseline,
            fits=self.sizes.fits,
        )
        study.begin(self._record)
        for judgement in self.judge.judgements.values():
            study.keep(judgement)
        self.judge.observer = study.keeping_judgements(self.judge.observer)
        return study

    @property
    def _record(self) -> TuningRecord:
        request, subject = self.request, self.prepared.subject
        return TuningRecord(
            run=request.run,
            began=request.began,
            workload=subject.name,
            target=request.source.target,
            folder=str(request.folder.absolute()),
            hardware=self.prepared.hardware.name,
            batch_size=subject.batch_size,
            baseline=self.candidates.baseline,
            objective=request.objective,
            options=request.options,
        )

    @cached_property
    def _earlier(self) -> tuple[Round, ...]:
        """The rounds that former runs of the study compared, as far as the samples are kept."""
        former = [run for run in self.study.runs() if run != self.request.run]
        kept = read_comparisons(self.request.folder, former) if former else ()
        return tuple(one for comparison in kept for one in comparison.by(self.request.objective).rounds)

    def narrow(self, evaluator: Evaluator, observer: Observer) -> None:
        """Measures which modules there are reasons to keep in FP32, and which batch sizes there are.

        Modules are timed by themselves and each dtype is judged; then the largest batches are found, if asked for.
        """
        request, prepared = self.request, self.prepared
        observer(GroundworkStarted(groundwork="modules"))
        ladder = timed_ladder(evaluator, prepared, self.candidates.space, request.budget, request.folder)
        candidates = candidates_for(prepared, request.wanted, ladder)
        observer(GroundworkStarted(groundwork="numerics"))
        check = check_precision(self.judge, candidates.halves_alone, prepared.subject)
        self.candidates, self.findings = candidates.guarded(check.safeguards), check.findings
        if request.wanted.batch_size == "auto":
            observer(GroundworkStarted(groundwork="batch-size"))
            arms = (*self.candidates.halves_alone, candidates.baseline)[:1]
            self.sizes = batch_sizes_for(evaluator, arms, prepared, request.budget, request.wanted.global_batch)
            candidates = candidates_for(prepared, request.wanted, ladder, self.sizes.sizes)
            self.candidates = candidates.guarded(check.safeguards)
            self.findings += tuple(self.sizes.findings)

    def begin_comparisons(self) -> Comparisons:
        """Begins the comparison after the search: the baseline, stock PyTorch, AMP recipes and the fastest trials."""
        time_s = FINALS_SHARE * self.request.budget.left_s
        self.comparisons = self._comparisons_of(_finalists(self.study, self.candidates, self.prepared.start_s, time_s))
        return self.comparisons

    def judge_ahead(self) -> None:
        """Judges the fastest finalists before they are compared, and the graph of the first if that is no waste."""
        assert self.comparisons is not None  # noqa: S101  # begin_comparisons makes it
        place = {policy: i for i, policy in enumerate(self.study.ranked())}
        ranked = sorted((p for p in self.comparisons.setup.finalists if p in place), key=place.__getitem__)
        for policy in ranked[:JUDGED_AHEAD]:
            self.judge.judgement_of(policy)
        sound = next((policy for policy in ranked if not self.judge.has_rejected(policy)), None)
        if sound is None or self._graph_s(sound) > graph_judgement_s(self.request.budget):
            return
        if self.judge.is_graph_open(sound):
            self.judge.judge_graph(sound)

    def sound_decision(self) -> Decision | None:
        """Returns the decision with its winner judged if there is time; a rejected winner is replaced by another."""
        decision = self.decision(provisional=False)
        while decision is not None and self.request.budget.left_s > -GRACE_S:
            winner = decision.winner
            if self.judge.is_open(winner):
                self.judge.judgement_of(winner)
            elif self.judge.is_graph_open(winner) and self._graph_s(winner) < self.request.budget.left_s + GRACE_S:
                self.judge.judge_graph(winner)
            else:
                return decision
            decision = self.decision(provisional=False)
        return decision

    def _graph_s(self, policy: Policy) -> float:
        """Returns the seconds to judge a policy together with its compiled graph."""
        return GRAPH_TIMES * compiled_s(policy, {trial.policy: trial.outcome for trial in self.study.trials})

    def decision(self, *, provisional: bool) -> Decision | None:
        decision = decide(
            self.prepared,
            self.study.trials,
            self.comparisons or self._comparisons_of(()),
            self.judge,
            noticed_before=self.findings,
            amp_recipes=self.candidates.amp_recipes,
            seconds=self.request.budget.spent_s,
            provisional=provisional,
        )
        return None if decision is None else decision.with_findings(self._noticed_after(decision.policy))

    def _noticed_after(self, winner: Policy) -> Iterator[Finding]:
        whole = self.request.wanted.global_batch
        if whole is not None:
            yield whole.kept_by(winner)
        if winner.fused_optimizer and not self.prepared.subject.fusable:
            message = "the optimizer has no fused kernel here or is fused as it is: fused_optimizer changes nothing"
            yield Finding(code="fused-optimizer-without-effect", message=message)
        modes = self.candidates.space.choices("compile")
        if set(modes) - {"off"} and all(trial.policy.compile == "off" for trial in self.study.trials):
            spent = "there was no time for it; give more with --budget"
            if self.request.budget.trials is not None:
                spent = "the budget, or the trials allowed, were spent before; give more with --budget or --trials"
            yield Finding(code="compile-not-tried", message=f"torch.compile was not tried: {spent}")

    def _comparisons_of(self, finalists: tuple[Policy, ...]) -> Comparisons:
        return Comparisons(
            setup=ComparisonSetup(
                baseline=self.candidates.baseline,
                finalists=finalists,
                eligible=self.study.__contains__,
                variant_eligible=self.candidates.allows,
                neighbours=self.study.neighbours,
                tried={trial.policy: trial.outcome for trial in self.study.trials},
                rejected=self.judge.has_rejected,
                objective=self.request.objective,
                seed=self.request.seed,
                earlier=self._earlier,
            )
        )


def _finalists(study: Study, candidates: Candidates, start_s: float, time_s: float) -> tuple[Policy, ...]:
    """Returns the policies to compare: as many as fit into `time_s`, the fastest trials before the known-good policies.

    The baseline, stock PyTorch, the best AMP recipe and the few fastest are always among them; failures cost nothing.
    """
    measured = study.ranked()
    ranked = [policy for policy in measured if policy in study]
    trials = {trial.policy: trial for trial in study.trials}
    costs_s = {policy: trials[policy].again_s for policy in measured}
    known = [policy for policy in candidates.known_good if policy in trials]
    recipes = [policy for policy in measured if policy in candidates.amp_recipes]
    found = dict.fromkeys([candidates.baseline, *known[:1], *recipes[:1], *ranked[:FEWEST_FINALISTS]])
    for policy in (*ranked[:FINALISTS], *known, *ranked[:MOST_FINALISTS]):
        launch_s = start_s + ROUNDS_PER_LAUNCH * sum(costs_s.get(one, 0.0) for one in {*found, policy})
        if policy not in costs_s or ENOUGH_LAUNCHES * launch_s < time_s:
            found[policy] = None
    return tuple(found)
