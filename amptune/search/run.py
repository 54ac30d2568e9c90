"""A tuning run in progress: all that is known so far, from which a decision can be made at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import Measurement
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.batch_size.batch_sizes import NO_SIZES, BatchSizes, batch_sizes_for
from amptune.search.decide.conclusion import decide
from amptune.search.decide.decision import Decision
from amptune.search.decide.samples import former_rows
from amptune.search.events import GroundworkStarted, Observer
from amptune.search.gate.judge import Judge
from amptune.search.groundwork import check_precision, timed_ladder
from amptune.search.narrowing import BLOCK, Narrowing
from amptune.search.plan.budget import COLD_SHARE, graph_judgement_s
from amptune.search.plan.compile_costs import cold_s, compiled_s
from amptune.search.request import TuningRequest
from amptune.search.sampler.records import TuningRecord
from amptune.search.sampler.study import Study, open_study
from amptune.search.space.candidates import Candidates, candidates_for
from amptune.search.table.effects import machine_of
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = ["TuningRun"]

# The gate compiles a graph anew for its batches, with dropout twice, in this many times the seconds of compiling for
# training (BERT-base on an H200: 31 s instead of 27).
GRAPH_TIMES = 1.3
# Loading a graph from the compiler's cache takes this share of compiling it: 2.5 of 25 to 40 s for ResNet-50
# (reports/h200/oracle).
CACHED_GRAPH = 0.1
# The baseline is measured in every run, for at most this long if the budget is shorter.
ANCHOR_S = 10.0
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
            sampler=self.request.sampler,
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
            device=self.prepared.hardware.device,
        )

    @cached_property
    def _former(self) -> list[Row]:
        """Rows that an earlier amptune kept beside the study."""
        return former_rows(self.request.folder, self.study.runs())

    @property
    def table(self) -> list[Row]:
        """Every timing of the study, of this run and of former ones."""
        return [*self._former, *self.study.table]

    def verdict(self) -> Verdict | None:
        """Returns the verdict on all rows; None if the baseline was not measured, or failed."""
        machine = machine_of(self.prepared.hardware.device)
        return verdict_of(self.table, self.candidates.baseline, machine, self.request.objective, self.bar)

    def bar(self, policy: Policy) -> str | None:
        """Returns why a policy cannot win; None if it can."""
        if self._is_unsound(policy):
            return "not as good as FP32"
        wanted = policy in self.study or self.candidates.allows(policy)
        return None if wanted else "outside the space: it was measured for comparison"

    def _is_unsound(self, policy: Policy) -> bool:
        """Returns True if it was judged and failed; or its dtype failed, and it lacks the rules that cure that."""
        if self.judge.has_rejected(policy):
            return True
        judged = self.judge.is_exempt(policy) or self.judge.known(policy) is not None
        cured = judged or any(rule.is_needed for rule in policy.fp32_modules)
        return not cured and self.judge.has_rejected(policy.recipe)

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

    def anchor(self, evaluator: Evaluator) -> None:
        """Measures the baseline in this run if only former runs did: no two runs are compared with each other."""
        baseline, run = self.candidates.baseline, self.request.run
        known = self.study.trial_of(baseline)
        if known is None or any(row.policy == baseline and row.run == run for row in self.table):
            return
        effort = self.request.objective.effort(replace(BLOCK, time_limit_s=max(ANCHOR_S, self.request.budget.left_s)))
        outcome = evaluator.measure(baseline, effort)
        if isinstance(outcome, Measurement):
            kind, moment_s = known.row.launch, self.request.budget.clock()
            self.study.add(Row(policy=baseline, outcome=outcome, run=run, launch=kind, moment_s=moment_s))

    def compare(self, evaluator: Evaluator, observer: Observer) -> None:
        """Measures what tells most about the verdict, until it is known or the budget is spent."""
        self.study.catch_up()
        self.anchor(evaluator)
        Narrowing(
            evaluator=evaluator,
            budget=self.request.budget,
            observer=observer,
            run=self.request.run,
            verdict=self.verdict,
            keep=self.study.add,
            objective=self.request.objective,
            bar=self.bar,
            unseen=self._unseen,
            rejects=self._rejects,
            cost_s=self._cost_s,
            start_s=self.prepared.start_s,
            reserve_s=lambda: self.judge.last_s,
            running={row.policy: row.launch for row in self.table if row.run == self.request.run},
            seed=self.request.seed,
        ).until_known()

    def _cost_s(self, policy: Policy) -> float:
        """Returns the seconds of one block in a fresh process, as far as the trials tell."""
        outcomes = {trial.policy: trial.outcome for trial in self.study.trials}
        known = self.study.trial_of(policy)
        if known is None:
            return median(trial.again_s for trial in self.study.trials) + cold_s(policy, outcomes)
        return known.again_s + CACHED_GRAPH * compiled_s(policy, outcomes)

    def _unseen(self, leader: Policy) -> Iterator[Policy]:
        """Yields the known-good policies that were not tried, then those one step from the leader that compile soon."""
        outcomes = {trial.policy: trial.outcome for trial in self.study.trials}
        for policy in (*self.candidates.known_good, *self.study.neighbours(leader)):
            if cold_s(policy, outcomes) <= COLD_SHARE * self.request.budget.left_s:
                yield policy

    def _rejects(self, policy: Policy) -> bool:
        """Judges a leader before time is spent on it, with its graph if that takes a small part of the time."""
        if self.judge.rejects(policy):
            return True
        if self.judge.is_graph_open(policy) and self._graph_s(policy) <= graph_judgement_s(self.request.budget):
            self.judge.judge_graph(policy)
        return self.judge.has_rejected(policy)

    def sound_decision(self) -> Decision | None:
        """Returns the decision with its winner judged if there is time; a rejected winner is replaced by another."""
        decision = self.decision(interrupted=False)
        while decision is not None and self.request.budget.left_s > -GRACE_S:
            winner = decision.winner
            if self.judge.is_open(winner):
                self.judge.judgement_of(winner)
            elif self.judge.is_graph_open(winner) and self._graph_s(winner) < self.request.budget.left_s + GRACE_S:
                self.judge.judge_graph(winner)
            else:
                return decision
            decision = self.decision(interrupted=False)
        return decision

    def _graph_s(self, policy: Policy) -> float:
        """Returns the seconds to judge a policy together with its compiled graph."""
        return GRAPH_TIMES * compiled_s(policy, {trial.policy: trial.outcome for trial in self.study.trials})

    def decision(self, *, interrupted: bool) -> Decision | None:
        self.study.catch_up()
        verdict = self.verdict()
        if verdict is None:
            return None
        decision = decide(
            self.prepared,
            self.study.trials,
            self.table,
            verdict,
            self.judge,
            noticed_before=self.findings,
            amp_recipes=self.candidates.amp_recipes,
            seconds=self.request.budget.spent_s,
            interrupted=interrupted,
        )
        return decision.with_findings(self._noticed_after(decision.policy))

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
