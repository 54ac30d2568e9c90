"""Performs jobs: the one place where a run measures, compiles, judges and writes to its study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.half_effects import Sensitivity
from amptune.measure.results.outcome import ENERGY_S, Effort, Failure, Measurement, Outcome
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.batch_size.batch_sizes import batch_sizes_for
from amptune.search.durations import BESIDE, Durations
from amptune.search.events import ComparisonStarted, Compiling, Observer, TrialEnded
from amptune.search.gate.judge import SHORTEST_LIMIT_S, Judge, PolicyJudged, cure_of
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Found, without_graph
from amptune.search.job import Job, JobKind
from amptune.search.measuring import MEASURING_LIMIT_S, RoundMeasurer
from amptune.search.plan.budget import SHORT_S
from amptune.search.refinements import candidates_of, sensed_as
from amptune.search.sampler.study import Study
from amptune.search.state import Graphs, State
from amptune.search.table.trial import Trial

__all__ = ["Performer"]

# A policy whose step is this many times slower than the leader's, per sample, is not measured to the end.
FAR_BEHIND = 3.0
# The longest limit of a trial that compiles its own graph, and the shortest of any.
COMPILED_LIMIT_S, LEAST_LIMIT_S = 600.0, 3.0
BRIEF = Effort(warmup_s=2.0, energy_s=ENERGY_S)
# The FP32 reference takes this share of the time that is left: the more time, the more steps it compares.
REFERENCE_SHARE = 0.08


@dataclass
class Performer:
    """Performs the jobs of one run with an evaluator, and writes what they find to the study.

    `findings` are what jobs have noticed.
    """

    evaluator: Evaluator
    study: Study
    judge: Judge
    observer: Observer
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        self._rounds: RoundMeasurer | None = None

    def perform(self, job: Job, state: State) -> State:
        """Performs a job; returns what is known then. Raises `StudyError` if the storage or a worker's start fails."""
        by_kind: Mapping[JobKind, Callable[[Job, State], State]] = {
            "batch size": self._find_batch_sizes,
            "compile": self._compile,
            "trial": self._trial,
            "numerics": self._judge,
            "cure": self._cure,
            "modules": self._sense,
            "wait": self._wait,
            "graph": self._judge,
            "comparison": self._round,
            "loader": self._try_loaders,
        }
        return self.seen(by_kind[job.kind](job, state))

    def seen(self, state: State) -> State:
        """Returns the state with what is measured by now, here and by other workers, and with the graphs that came."""
        return self.known(state).but(elsewhere=self.study.elsewhere, graphs=self._graphs(state.graphs, 0.0))

    def known(self, state: State) -> State:
        """Returns the state with what the study has in memory, whatever happened to its storage."""
        rows, spent_s = tuple(self.study.rows), state.request.budget.spent_s
        return state.but(history=self.study.history, rows=rows, spent_s=spent_s)

    def _graphs(self, graphs: Graphs, wait_s: float) -> Graphs:
        """Returns the graphs with those that came. One that was stopped for another's memory can be asked for again."""
        came = self.evaluator.compiled(wait_s) if graphs.begun else {}
        running = self.evaluator.compiling
        begun = {one: at_s for one, at_s in graphs.begun.items() if one not in came and one in running}
        ready = {**graphs.ready, **{one: result for one, result in came.items() if one in graphs.begun}}
        return replace(graphs, begun=begun, ready=ready)

    def _find_batch_sizes(self, job: Job, state: State) -> State:
        budget, whole = state.request.budget, state.request.wanted.global_batch
        rest_s = budget.left_s - job.limit_s
        left_s = lambda: budget.left_s - rest_s  # noqa: E731
        sizes = batch_sizes_for(self.evaluator, job.policies[0], state.prepared, whole, left_s=left_s)
        return self.with_candidates(state.but(sizes=sizes))

    def with_candidates(self, state: State) -> State:
        """Returns the state with its candidates made anew, of what is known of modules, batch sizes and safeguards."""
        found = candidates_of(state)
        if found == state.candidates:
            return state
        self.study.adopt(found.space, found.policy_of)
        return state.but(candidates=found)

    def _compile(self, job: Job, state: State) -> State:
        policy, *lost = job.policies  # the others give it their place
        if not self.study.claim(policy):
            return state
        for one in lost:
            self.evaluator.stop_compiling(one)
            self.study.release(one)
        begun = {one: at_s for one, at_s in state.graphs.begun.items() if one not in lost}
        graphs = replace(state.graphs, begun={**begun, policy: state.request.budget.spent_s})
        self.observer(Compiling(policy=policy, left_s=state.request.budget.left_s))
        self.evaluator.begin_compiling(policy, job.limit_s)
        return state.but(graphs=graphs, cut=state.cut.union(lost))

    def _wait(self, job: Job, state: State) -> State:
        return state.but(graphs=self._graphs(state.graphs, job.limit_s))

    def _trial(self, job: Job, state: State) -> State:
        """Measures a policy: in the process where it was compiled, if its graph is ready.

        If compiling it failed, that is told; if it lacked memory beside the others or was killed, it is compiled again,
        in its trial. A policy that another worker has claimed meanwhile gives nothing.
        """
        if not job.policies:
            proposed = self.study.suggested(state.cut | state.graphs.known)
            if proposed is None:
                return state.but(free_sampler=False)
            job = replace(job, policies=(proposed,))
        (policy,) = job.policies
        result = state.graphs.ready.get(policy, 0.0)
        ready = {one: its for one, its in state.graphs.ready.items() if one != policy}
        state = state.but(graphs=replace(state.graphs, ready=ready))
        if policy != state.baseline and not self.study.claim(policy):
            return state
        try:
            if isinstance(result, Failure) and result.kind not in ("oom", "killed"):
                return self._told(self._made(policy, result, 0.0, state), state)
            return self._measured(policy, job.limit_s, 0.0 if isinstance(result, Failure) else result, state)
        finally:
            self.study.release(policy)

    def _measured(self, policy: Policy, left_s: float, compile_s: float, state: State) -> State:
        """Runs one trial. One that the budget cut short says nothing about the policy, which is then left out."""
        budget, is_baseline = state.request.budget, policy == state.baseline
        longest_s = MEASURING_LIMIT_S if policy.compile == "off" or compile_s > 0 else COMPILED_LIMIT_S
        limit_s = min(longest_s, max(SHORT_S if is_baseline else LEAST_LIMIT_S, left_s))
        before_s = budget.spent_s
        beside = policy.compile == "off" and not is_baseline and Durations(state).is_late
        effort = replace(_effort(policy, limit_s, state), beside_compiling=beside)
        outcome = self.evaluator.measure(policy, effort)
        if is_baseline and isinstance(outcome, Failure) and outcome.kind == "crash":
            rest_s = max(SHORT_S, limit_s - (budget.spent_s - before_s))  # perhaps an accident, and all rests on it
            outcome = self.evaluator.measure(policy, replace(effort, time_limit_s=rest_s))
        if isinstance(outcome, Measurement):
            outcome = replace(outcome, startup_s=max(outcome.startup_s, compile_s))
        if isinstance(outcome, Failure) and outcome.kind == "timeout" and limit_s < longest_s:
            return state.but(cut=state.cut | {policy})
        return self._told(self._made(policy, outcome, budget.spent_s - before_s + compile_s, state), state)

    def _made(self, policy: Policy, outcome: Outcome, seconds: float, state: State) -> Trial:
        number, run, moment_s = len(self.study.trials), state.request.run, state.request.budget.clock()
        return Trial(number=number, policy=policy, outcome=outcome, seconds=seconds, run=run, moment_s=moment_s)

    def _told(self, trial: Trial, state: State) -> State:
        """Keeps a trial; one more of the baseline, which former runs have measured, as a row, unless it fails now."""
        is_known = trial.policy == state.baseline and trial.policy in self.study.history.latest
        if is_known and isinstance(trial.outcome, Measurement):
            self.study.add(trial.row)
            return state
        self.study.tell(trial)
        known = state.but(history=self.study.history)
        self.observer(
            TrialEnded(
                trial=trial,
                best=known.best_trial,
                baseline=known.own_baseline,
                left_s=state.request.budget.left_s,
                objective=state.request.objective,
            )
        )
        return known

    def _judge(self, job: Job, state: State) -> State:
        """Judges a policy; a precision that is not as good as FP32 is left out of the search until it is cured."""
        (policy,) = job.policies
        budget, is_graph = state.request.budget, job.kind == "graph"
        before_s, own = budget.spent_s, policy if is_graph else without_graph(policy)
        least_s = 0.0 if is_graph else min(SHORTEST_LIMIT_S, budget.left_s + SHORT_S)
        found = self.judge.judge(
            own,
            seconds_for_reference=REFERENCE_SHARE * budget.left_s,
            limit_s=max(least_s, job.limit_s),
        )
        if isinstance(found, Failure):
            message = f"numerics could not be judged, as there is no FP32 reference: {found}"
            self.findings += (Finding(code="no-reference", message=message),)
        judged_s = budget.spent_s - before_s
        if isinstance(found, Judgement) and found.parity.seconds > 0:
            judged_s = found.parity.seconds  # the reference, which the first one waited for, is there now
        state = self._with_judgements(state, *(() if found is None else (found,))).but(judged_s=judged_s)
        precision = policy.precision
        is_recipe = policy in state.candidates.halves_alone and precision not in state.safeguards
        if not isinstance(found, Judgement) or found.passes or not is_recipe:
            return state
        safeguards = {**state.safeguards, precision: None}
        return self.with_candidates(state.but(uncured=state.uncured | {precision}, safeguards=safeguards))

    def _with_judgements(self, state: State, *found: Found) -> State:
        """Keeps and reports judgements; returns the state with them."""
        for one in found:
            if isinstance(one, Judgement):
                self.study.keep(one)
                self.observer(PolicyJudged(judgement=one, left_s=state.request.budget.left_s))
        return state.but(judgements=state.judgements.also(*found))

    def _cure(self, job: Job, state: State) -> State:
        """Looks for the modules that a rejected precision needs in FP32."""
        (policy,) = job.policies
        budget = state.request.budget
        until_s = budget.spent_s + job.limit_s
        rejected = state.judgements.rejection_of(policy)
        state = state.but(uncured=state.uncured - {policy.precision})
        if rejected is None:
            return state
        cure, findings, found = cure_of(
            self.judge,
            rejected,
            state.prepared.subject,
            until=lambda: budget.spent_s > until_s or budget.left_s <= 0,
            limit_s=max(SHORTEST_LIMIT_S, budget.left_s),
        )
        self.findings += findings
        safeguards = {**state.safeguards, policy.precision: None if cure is None else cure.rules}
        return self.with_candidates(self._with_judgements(state, *found).but(safeguards=safeguards))

    def _sense(self, job: Job, state: State) -> State:
        """Times the modules. The study has one order of modules, for all its workers: that of who came first."""
        (policy,) = job.policies
        name, _ = sensed_as(state, policy.memory_format)
        found = self.evaluator.sense(policy, state.candidates.stored.half_dtypes, job.limit_s)
        if isinstance(found, Failure):
            found = Sensitivity(modules=(), cast_ms_per_byte=0.0)
        else:
            found = self.study.keep_sensed(name, found)
        return self.with_candidates(state.but(sensed={**state.sensed, name: found}))

    def _round(self, job: Job, state: State) -> State:
        """Measures a round of the comparison; what starting its processes took tells of the next one."""
        rounds, budget, policies = state.rounds, state.request.budget, job.policies
        measurer = self._measurer(state)
        verdict = state.verdict
        leader = None if verdict is None or verdict.leader is None else verdict.leader.policy
        if not set(policies) <= set(rounds.costs_s):
            self.observer(ComparisonStarted(stage="comparison", policies=policies, left_s=budget.left_s, leader=leader))
        measurer.in_loop = verdict is None or not verdict.waits_for_data
        steps_ms = {one: ms for one in policies if (ms := state.step_ms(one)) is not None}
        before_s = budget.spent_s
        is_whole = measurer.measure(policies, steps_ms, fresh=job.fresh, until_s=before_s + job.limit_s)
        one_s = measurer.launch_s / (1 + BESIDE * (len(policies) - 1))
        return state.but(
            rounds=replace(
                rounds,
                count=measurer.launches,
                running=dict(measurer.running),
                start_s=one_s if job.fresh else rounds.start_s,
                costs_s=dict(measurer.costs_s),
                loader_failure=measurer.loader_failure,
                is_over=not is_whole,
            )
        )

    def _try_loaders(self, job: Job, state: State) -> State:
        found = self.evaluator.try_loaders(job.policies[0], job.limit_s)
        if isinstance(found, Failure):
            self.findings += (Finding(code="loader-not-tried", message=f"settings of the loader: {found}"),)
            found = ()
        return state.but(loaders=found)

    def _measurer(self, state: State) -> RoundMeasurer:
        if self._rounds is None:
            request = state.request
            self._rounds = RoundMeasurer(
                evaluator=self.evaluator,
                budget=request.budget,
                observer=self.observer,
                run=request.run,
                keep=self.study.add,
                objective=request.objective,
                seed=request.seed,
            )
        self._rounds.running = state.running
        return self._rounds


def _effort(policy: Policy, limit_s: float, state: State) -> Effort:
    """Returns how long to measure a policy; one that is far behind the best of this run is over after its first steps.

    A policy that uses little energy may be slow, and only a longer block shows that.
    """
    objective, scores = state.request.objective, state.scores
    effort = objective.effort(replace(BRIEF, time_limit_s=limit_s))
    of_run = [one for one in state.history.latest.values() if one.run == state.request.run and one.policy in scores]
    best = max(of_run, key=lambda trial: scores[trial.policy], default=None)
    if best is None or not isinstance(best.outcome, Measurement) or objective.name == "energy":
        return effort
    same = policy.batch_size == best.policy.batch_size and policy.accumulate == best.policy.accumulate
    if not same and policy.batch_size is None:
        return effort
    own = (policy.batch_size or 1) * policy.accumulate * best.outcome.devices
    samples = best.outcome.samples_per_step if same else own
    enough = best.samples_per_s / state.history.yardstick.share_of_needed_speed(best.outcome)
    return replace(effort, abandon_above_ms=FAR_BEHIND * 1000 * samples / enough)
