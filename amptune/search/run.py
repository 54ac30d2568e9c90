"""A tuning run in progress: all that is known so far, from which a decision can be made at any moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import Measurement
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.batch_size.batch_sizes import NO_SIZES, BatchSizes, batch_sizes_for
from amptune.search.decide.conclusion import decide
from amptune.search.decide.decision import Decision
from amptune.search.decide.samples import former_rows
from amptune.search.events import Observer, SearchEnded, SearchStarted
from amptune.search.gate.judge import Judge
from amptune.search.graphs import BEHIND, Graphs, typical_s
from amptune.search.groundwork import Modules, Numerics
from amptune.search.narrowing import BLOCK, Narrowing
from amptune.search.plan.budget import SHORT_S
from amptune.search.plan.compile_costs import cold_s, compiled_s
from amptune.search.plan.plan import Plan, Step, Wants
from amptune.search.request import TuningRequest
from amptune.search.sampler.records import TuningRecord, without_password
from amptune.search.sampler.study import Study, open_study
from amptune.search.space.candidates import Candidates, candidates_for
from amptune.search.space.exclusions import Ladder
from amptune.search.table.effects import machine_of
from amptune.search.table.next_rows import MOST_POLICIES, launch_s
from amptune.search.table.row import Row
from amptune.search.table.verdict import PROCESSES, Verdict, verdict_of
from amptune.search.trials import Trials

__all__ = ["TuningRun"]

# The gate compiles a graph anew for its batches, with dropout twice, in this many times the seconds of compiling for
# training (BERT-base on an H200: 31 s instead of 27).
GRAPH_TIMES = 1.3
# Loading a graph from the compiler's cache takes this share of compiling it: 2.5 of 25 to 40 s for ResNet-50
# (reports/h200/oracle).
CACHED_GRAPH = 0.1
# Seconds beyond the budget for judging the winner.
GRACE_S = 8.0
# Finding the largest batch takes at most this share of the time: nothing else is measured meanwhile.
BATCH_SIZES_SHARE = 1 / 8
# The rounds of the comparison get no more than this share of the time: with a quarter, simulated tunings of 120 s lost
# 7.6 % in place of 4.5 %.
COMPARISON_SHARE = 1 / 6


@dataclass
class TuningRun:
    """A tuning run in progress, from which a decision can be made at any moment.

    `findings` are those from before the search.
    """

    request: TuningRequest
    prepared: Prepared
    candidates: Candidates
    judge: Judge
    evaluator: Evaluator
    observer: Observer
    plan: Plan
    findings: tuple[Finding, ...] = ()
    sizes: BatchSizes = NO_SIZES

    def __post_init__(self) -> None:
        self._built_s = self.request.budget.spent_s
        self._has_ended = False
        self._verdict: tuple[Any, Verdict | None] | None = None

    @cached_property
    def study(self) -> Study:
        """The study, opened at first use: after the space is narrowed, or when that is interrupted."""
        candidates = self.candidates
        study = open_study(
            self.request.study,
            candidates.study_name,
            candidates.space,
            candidates.policy_of,
            seed=self.request.seed,
            stored=candidates.stored,
            objective=self.request.objective,
            baseline=candidates.baseline,
            fits=self.sizes.fits,
            sampler=self.request.sampler,
        )
        study.begin(self._record)
        for judgement in self.judge.judgements.by_numerics.values():
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
            arguments=request.source.arguments,
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
        table, known_as = self.table, self._verdict
        state = len(table), self.judge.judgements, self.candidates
        if known_as is None or known_as[0] != state:
            machine = machine_of(self.prepared.hardware.device)
            found = verdict_of(table, self.candidates.baseline, machine, self.request.objective, self.bar)
            self._verdict = known_as = state, found
        return known_as[1]

    def bar(self, policy: Policy) -> str | None:
        """Returns why a policy cannot win; None if it can."""
        if self.judge.judgements.bars(policy):
            return "not as good as FP32"
        wanted = policy in self.study or self.candidates.allows(policy)
        return None if wanted else "outside the space: it was measured for comparison"

    def find_answer(self) -> None:
        """Searches, judges and compares as the plan has it, until the answer is known or the budget is spent."""
        self._find_batch_sizes()
        study, request = self.study, self.request
        study.reconsider(self.candidates.baseline)
        self._put_first()
        self.observer(
            SearchStarted(
                architecture=self.candidates.space.architecture,
                size=study.size,
                remembered=len(study.trials),
                study=without_password(str(request.study)),
                left_s=request.budget.left_s,
            )
        )
        self._anchor()
        search: list[Wants] = [self._graphs.wants, self._trials.wants, self._trials.compiling]
        search += [self._numerics.wants, self._modules.wants, self._numerics.graph]
        stages: list[list[Wants]] = [search, [self._graphs.wait], [self._comparison]]
        try:
            self.plan.carry_out(stages, self._needed_s)
            self._end_search(self._trials.ended_because())
        except StudyError as error:  # a failing storage, or no worker can be started: what is in memory still decides
            self._end_search(str(error))
        finally:
            for give_back in (self._trials.drop, self._graphs.forget):
                with suppress(StudyError):
                    give_back()
            self.study.keep_timeline(self.plan.timeline)

    def _end_search(self, because: str) -> None:
        """Tells once why no more policies are measured."""
        if not self._has_ended:
            self._has_ended = True
            measured, left_s = self._trials.measured, self.request.budget.left_s
            self.observer(SearchEnded(because=because, trials=measured, left_s=left_s))

    def _find_batch_sizes(self) -> None:
        """Finds the largest batches, if asked for, before anything compiles beside that."""
        wanted, prepared, ladder = self.request.wanted, self.prepared, self._modules.ladder()
        if ladder is not None:
            self._take_ladder(ladder)
        if wanted.batch_size != "auto":
            return
        arms = (*self.candidates.halves_alone, self.candidates.baseline)[:1]
        seconds = self.request.budget.left_s * BATCH_SIZES_SHARE
        rest_s = self.request.budget.left_s - seconds

        def act(_: float) -> None:
            left_s = lambda: self.request.budget.left_s - rest_s  # noqa: E731
            self.sizes = batch_sizes_for(self.evaluator, arms, prepared, wanted.global_batch, left_s=left_s)

        what = f"the largest batch under {arms[0]}"
        self.plan.do(Step(stage="batch size", what=what, seconds=seconds, worth=math.inf, act=act), seconds)
        self._take_ladder(self._modules.ladder())
        self.findings += tuple(self.sizes.findings)

    def _put_first(self) -> None:
        """Has the known-good policies measured first; those that compile in the background come by themselves."""
        first = self.candidates.first
        if self._modules.are_open:
            first = tuple(policy for policy in first if not policy.fp32_modules)
            self.study.leave_out(lambda policy: any(not rule.is_needed for rule in policy.fp32_modules))
        self.study.measure_first(policy for policy in first if policy.compile not in BEHIND)

    def _take_ladder(self, ladder: Ladder | None) -> None:
        """Makes the candidates anew, from the modules' measured times and the batch sizes that were found."""
        candidates = candidates_for(self.prepared, self.request.wanted, ladder, self.sizes.sizes)
        self.candidates = candidates.guarded(self._numerics.safeguards)

    def _changed(self) -> None:
        """Goes on with other policies: modules were timed, or a precision needs some of them in FP32."""
        self._trials.drop()
        self._graphs.drop()
        before = self.candidates
        self._take_ladder(self._modules.ladder())
        self.study.leave_nothing_out()
        if self.candidates != before:
            self.study.adopt(self.candidates.space, self.candidates.policy_of, self.sizes.fits)
        self._put_first()

    @cached_property
    def _graphs(self) -> Graphs:
        return Graphs(
            self.study,
            self.evaluator,
            self.request.budget,
            self.candidates.baseline,
            self.observer,
            leaves=len(self.prepared.subject.leaves),
            repeated_leaves=self.prepared.subject.repeated_leaves,
            memory_mib=self.prepared.memory_mib or math.inf,
            trials_left=lambda: self._trials.left,
        )

    @cached_property
    def _trials(self) -> Trials:
        request, baseline = self.request, self.candidates.baseline
        return Trials(self.study, self.evaluator, request.budget, baseline, self.observer, self._graphs, request.run)

    @cached_property
    def _numerics(self) -> Numerics:
        return Numerics(
            self.judge,
            self.prepared.subject,
            study=lambda: self.study,
            recipes=self.candidates.halves_alone,
            changed=self._changed,
            graph_s=self._graph_s,
        )

    @cached_property
    def _modules(self) -> Modules:
        return Modules(self.evaluator, self.prepared, self.candidates.space, self.request.folder, timed=self._changed)

    def _anchor(self) -> None:
        """Measures the baseline in this run if only former runs did: no two runs are compared with each other."""
        baseline, run = self.candidates.baseline, self.request.run
        known = self.study.trial_of(baseline)
        if known is None or any(row.policy == baseline and row.run == run for row in self.table):
            return
        effort = self.request.objective.effort(replace(BLOCK, time_limit_s=max(SHORT_S, self.request.budget.left_s)))
        outcome = self.evaluator.measure(baseline, effort)
        if isinstance(outcome, Measurement):
            kind, moment_s = known.row.launch, self.request.budget.clock()
            self.study.add(Row(policy=baseline, outcome=outcome, run=run, launch=kind, moment_s=moment_s))

    @cached_property
    def _narrowing(self) -> Narrowing:
        return Narrowing(
            evaluator=self.evaluator,
            budget=self.request.budget,
            observer=self.observer,
            run=self.request.run,
            verdict=self.verdict,
            keep=self.study.add,
            objective=self.request.objective,
            bar=self.bar,
            unseen=self._unseen,
            beside=self._better_recipe,
            rejects=self.judge.judged_unsound,
            cost_s=self._cost_s,
            start_s=self.prepared.start_s,
            judging_s=self._judging_s,
            reserve_s=lambda: typical_s(self.study) if self._graphs.may_come else 0.0,
            seed=self.request.seed,
        )

    def _comparison(self, _free_s: float) -> Step | None:
        """Returns the round of the comparison that tells most, once there is something to compare."""
        if not self._narrowing.rounds:  # the processes of the trials still run, as a rule
            own = (row for row in self.table if row.run == self.request.run)
            self._narrowing.running = {row.policy: row.launch for row in own}
        step = self._narrowing.wants()
        return None if step is None else replace(step, act=partial(self._compare, step))

    def _compare(self, step: Step, limit_s: float) -> None:
        if not (self._has_ended or self._graphs.may_come):
            self._end_search(self._trials.ended_because())
        step.act(limit_s)

    def _needed_s(self) -> float:
        """Returns the seconds to keep for the answer: for judging it, and comparing it in fresh processes.

        They are infinite if there can be no answer.
        """
        if self._trials.has_failed:
            return math.inf
        if len(self.study.trials) < 2:
            return 0.0
        ranked = sorted(self.study.trials, key=lambda trial: -(self.study.yardstick.score(trial.outcome) or 0.0))
        compared = [self.candidates.baseline, *(trial.policy for trial in ranked)][:MOST_POLICIES]
        costs = list(map(self._cost_s, compared))
        done = self._narrowing.rounds

        def round_s(count: int) -> float:
            return launch_s(self._narrowing.start_s, count) + sum(costs[:count])

        most = max(0, PROCESSES - done) * round_s(len(costs))
        share = COMPARISON_SHARE * (self.request.budget.seconds - self._built_s)
        running_s = sum(costs[:2])  # a turn of the baseline and the best policy, in the processes that run
        has_time = not self._graphs.is_awaited and share >= round_s(2)  # a graph is worth more than fresh processes
        kept_s = min(most, share) if has_time or done else min(running_s, share)
        return self._judging_s(ranked[0].policy) + kept_s

    def _judging_s(self, policy: Policy) -> float:
        """Returns the seconds to judge a policy without its graph."""
        return self.judge.last_s if self.judge.is_open(policy) else 0.0

    def _cost_s(self, policy: Policy) -> float:
        """Returns the seconds of one block in a fresh process, as far as the trials tell."""
        outcomes = {trial.policy: trial.outcome for trial in self.study.trials}
        known = self.study.trial_of(policy)
        if known is None:
            return median(trial.again_s for trial in self.study.trials) + cold_s(policy, outcomes)
        return known.again_s + CACHED_GRAPH * compiled_s(policy, outcomes)

    def _unseen(self, leader: Policy) -> Iterator[Policy]:
        """Yields the known-good policies that were not tried, then those one step from the leader; none to compile."""
        outcomes = {trial.policy: trial.outcome for trial in self.study.trials}
        for policy in (*self.candidates.known_good, *self.study.neighbours(leader)):
            if not cold_s(policy, outcomes):
                yield policy

    def _better_recipe(self, verdict: Verdict) -> list[Policy]:
        """Returns the faster AMP recipe, which everybody would try first."""
        recipes = (one for one in verdict.contenders if one.policy in self.candidates.amp_recipes and not one.failure)
        return [one.policy for one in recipes][:1]

    def sound_decision(self) -> Decision | None:
        """Returns the decision with its winner judged if there is time; a rejected winner is replaced by another."""
        decision = self.decision(interrupted=False)
        while decision is not None and self.request.budget.left_s > -GRACE_S:
            winner, left_s = decision.winner, self.request.budget.left_s + GRACE_S
            if self.judge.is_open(winner):
                self.judge.judgement_of(winner)
            elif self.judge.is_graph_open(winner) and self._graph_s(winner) < min(left_s, self.judge.longest_graph_s):
                self.judge.judge_graph(winner, left_s)
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
            noticed_before=(
                *self.prepared.mistakes,
                *self.findings,
                *self._numerics.findings,
                *self._narrowing.findings,
            ),
            amp_recipes=self.candidates.amp_recipes,
            seconds=self.request.budget.spent_s,
            interrupted=interrupted,
            timeline=self.plan.timeline,
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
