"""The search loop: asks for a policy, measures it, tells the result, until the budget or the space is used up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import ENERGY_S, Effort, Failure, Measurement, Outcome
from amptune.policy.settings import AUTOTUNED_MODES, Policy
from amptune.search.compile_schedule import (
    GraphsAtOnce,
    best_of_dtypes,
    cannot_compile,
    instead_of,
    one_of_each_kind,
)
from amptune.search.events import Compiling, Observer, SearchEnded, TrialEnded, TrialStarted
from amptune.search.plan.budget import Budget
from amptune.search.plan.compile_costs import cold_s, expected_compile_s
from amptune.search.sampler.study import Study, Suggestion
from amptune.search.table.trial import Trial

__all__ = ["best_of", "search"]

# An expected improvement below this share is not worth a trial, once there are enough trials to base it on.
PROMISING = 0.0003
ENOUGH_TRIALS = 20
# A policy whose step is this many times slower than the best, per sample, is measured only briefly.
HOPELESS = 2.0
TRIAL_LIMIT_S, COMPILED_LIMIT_S = 120.0, 600.0
# The largest share of the budget for one trial's warm-up: on a busy host step times never become steady. On such a host
# of an H200 three trials of DeepLabV3+ waited for that in vain for 14 of 108 s. The warm-up is never shorter than it
# takes to see steady times: three stretches of 0.1 s or a step each, and one to spare.
WARMUP_SHARE = 1 / 60
STRETCHES, STRETCH_S = 4, 0.1
# cudnn.benchmark times every algorithm for every shape: 10 to 25 s for each dtype and layout of a convolution network
# whose trial takes 1.2 s without (ResNet-50 on an H200, torch 2.11, reports/h200/oracle); torch.compile takes 25 to
# 40 s. So the search begins without them: for this share of its time, and no longer than CHEAP_S; for a larger share if
# batch sizes are searched (reports/samplers.json).
CHEAP = {"cudnn_benchmark": False, "compile": "off"}
CHEAP_SHARE, CHEAP_S, CHEAP_SHARE_WITH_SIZES = 0.35, 40.0, 0.5
# The least seconds of a trial if no similar one was seen; a compiled one takes more if the model is large.
SHORTEST_DEAR_S, SHORTEST_COMPILED_S, SHORTEST_AUTOTUNED_S = 5.0, 25.0, 150.0
# Shares of the time kept for comparisons that may be spent: on the first compiled policy and those that come `soon`;
# and on measuring policies compiled ahead. Shares of all the time left: for compiling several graphs in parallel; and
# for that together with measuring them.
BORROWED, BORROWED_FOR_COMPILED, GRAPHS_SHARE, MEASURED_SHARE = 0.4, 0.7, 0.6, 0.8
# Policies that come `soon` are measured before any is compiled ahead if they take at most this share of the time left.
SOON_SHARE = 0.15
# The share of the allowed trials that are compiled before all others.
GRAPHS_OF_TRIALS = 0.25
OUT_OF_TIME = "the budget for searching is spent"
THE_REST_IS_LEFT_OUT = "what is left of the space does not fit, takes too much time, or cannot be compiled here"
# Less time than this is not enough for a trial in a worker that already runs.
SHORTEST_TRIAL_S = 3.0
# Without the baseline there is no answer, so it gets this much even if little of the budget is left.
SHORTEST_BASELINE_S = 10.0


def search(
    study: Study,
    evaluator: Evaluator,
    budget: Budget,
    *,
    baseline: Policy,
    reserve_s: Callable[[], float],
    observer: Observer,
    soon: Collection[Policy] = (),
    graphs_at_once: GraphsAtOnce | None = None,
    run: str = "",
) -> None:
    """Measures what the study suggests, one policy after another, and leaves `reserve_s()` of the budget unspent.

    The baseline comes first, then the policies in `soon`. If several graphs can be compiled in parallel, one of each
    kind follows; the graphs come before `soon` if those trials take long. Both may spend some of the reserve. Every
    outcome is in the study when this returns.
    """
    loop = _Search(study, evaluator, budget, baseline, reserve_s, observer, soon, graphs_at_once or GraphsAtOnce(), run)
    try:
        because = loop.until_done()
    except StudyError as error:  # a failing storage ends the search; the trials in memory still decide
        because = str(error)
    observer(SearchEnded(because=because, trials=loop.measured, left_s=budget.left_s))


def best_of(study: Study) -> Trial | None:
    """Returns the best trial so far that is fast enough for the objective, or None."""
    yardstick = study.yardstick
    alive = (trial for trial in study.trials if yardstick.allows(trial.outcome))
    return max(alive, key=lambda trial: yardstick.score(trial.outcome) or 0.0, default=None)


@dataclass
class _Search:
    """One search. It measures in this order: the baseline, the known-good policies and the first CUDA graphs; a
    compiled graph of each kind, if several compile in parallel; cheap trials; expensive trials on the best of those;
    then the policy that promises most for its time.
    """

    study: Study
    evaluator: Evaluator
    budget: Budget
    baseline: Policy
    reserve_s: Callable[[], float]
    observer: Observer
    soon: Collection[Policy]
    graphs_at_once: GraphsAtOnce
    run: str

    def __post_init__(self) -> None:
        self._known = self._of_this_run
        # The settings of the cheap stage; empty in the stage after it.
        self._fixed = {name: value for name, value in CHEAP.items() if self.study.has_knob(name)}
        sizes = self.study.has_knob("batch_size")
        self._cheap_share, self._cheap_s = (CHEAP_SHARE_WITH_SIZES, math.inf) if sizes else (CHEAP_SHARE, CHEAP_S)
        self._began_s = self.budget.spent_s
        self._looked_ahead = False
        # Policies compiled ahead of their trial, with the seconds that took; the most to reserve if none was ready.
        self._compiled: dict[Policy, float] = {}
        self._most_kept_s = math.inf

    @property
    def measured(self) -> int:
        """The number of trials that this search made."""
        return self._of_this_run - self._known

    @property
    def _of_this_run(self) -> int:
        """The number of trials of this run; other workers on the study have runs of their own."""
        return sum(trial.run == self.run for trial in self.study.trials)

    def until_done(self) -> str:
        """Searches until there is a reason to stop, and returns it in words."""
        while self.budget.trials is None or self.measured < self.budget.trials:
            first = self.study.trial_of(self.baseline)
            if first is not None and self._is_out_of_time():
                return OUT_OF_TIME
            suggestion = self.study.suggest(self._fixed)
            if first is not None and self._is_to_look_ahead(suggestion):
                self._forget(suggestion)
                self._looked_ahead = True
                self._compile_ahead(first.outcome)
            elif self._fixed and self._looked_ahead and self._cheap_stage_is_over(suggestion):
                self._forget(suggestion)
                self._fixed = {}
                self.study.measure_first(best_of_dtypes(self.study))
            elif suggestion is None:
                return THE_REST_IS_LEFT_OUT if self.study.has_left_out else "every policy of the space is measured"
            elif _is_hopeless(suggestion, self.study):
                self._forget(suggestion)
                return "no policy that is left promises to be better"
            elif self._is_too_dear(suggestion.policy):
                self._forget(suggestion)
                self.study.leave_out(partial(_is_as_dear, suggestion.policy))
            elif (because := self._measure(suggestion)) is not None:
                return because
        return f"all trials that are allowed are done: {self.budget.trials}"

    @property
    def _left_s(self) -> float:
        """The time left beyond the reserve; with the baseline alone there is nothing to compare, so no reserve."""
        return self.budget.left_s - (self._reserve_s if len(self.study.trials) > 1 else 0.0)

    @property
    def _reserve_s(self) -> float:
        """The time to reserve: at most half of what was left if compiling ahead was in vain, to compare something."""
        return min(self.reserve_s(), self._most_kept_s)

    def _is_out_of_time(self) -> bool:
        """Returns False while a policy is compiled but not measured, or a policy in `soon` can still borrow time."""
        needs_more = any(self.study.trial_of(policy) is None for policy in self.soon)
        left_s = self._left_s + (BORROWED * self._reserve_s if needs_more else 0.0)
        return not self._compiled and left_s < SHORTEST_TRIAL_S

    def _left_for(self, policy: Policy) -> float:
        """Returns the time for a policy's trial, including time borrowed from the comparisons.

        The first graph and the policies in `soon` may borrow: they can gain more than a few launches would tell.
        """
        is_first = policy.compile != "off" and all(trial.policy.compile == "off" for trial in self.study.trials)
        share = BORROWED if is_first or policy in self.soon else 0.0
        return self._left_s + self._reserve_s * (BORROWED_FOR_COMPILED if policy in self._compiled else share)

    @property
    def _trial_s(self) -> float:
        """The typical time of a trial."""
        return median(trial.seconds for trial in self.study.trials)

    def _is_to_look_ahead(self, suggestion: Suggestion | None) -> bool:
        """Returns True if graphs are to be compiled ahead: after the policies in `soon`, if those take little time.

        On a slow host graphs may not be ready in their time. DenseNet-161 lost 95 s that way, and had one policy to
        compare with stock PyTorch (an H200, a budget of 215 s).
        """
        if self._looked_ahead or suggestion is None or suggestion.policy not in self.soon:
            return not self._looked_ahead
        count = sum(self.study.trial_of(policy) is None for policy in self.soon)
        return count * self._trial_s > SOON_SHARE * self.budget.left_s

    def _compile_ahead(self, baseline: Outcome) -> None:
        """Compiles one policy of each kind in parallel, to be measured next, if two or more can be.

        It does not do so for the objective memory, as CUDA graphs need more memory.
        """
        if not isinstance(baseline, Measurement) or self.study.yardstick.objective.name == "memory":
            return
        kinds = one_of_each_kind(self.study, self.baseline)
        trials = math.inf if self.budget.trials is None else GRAPHS_OF_TRIALS * self.budget.trials
        policies = kinds[: int(min(trials, self.graphs_at_once.within(self._enough_s, baseline)))]
        if len(policies) > 1:
            self.observer(Compiling(policies=tuple(policies), left_s=self.budget.left_s))
            self._compiled = dict(self.evaluator.compile(policies, GRAPHS_SHARE * self.budget.left_s))
            self._began_s = self.budget.spent_s  # the cheap trials still get all their time
            if not self._compiled:
                self._most_kept_s = max(0.0, self.budget.left_s / 2)
            self.study.measure_next([policy for policy in policies if policy in self._compiled])

    def _enough_s(self, graphs: int) -> float:
        """Returns the seconds to compile this many graphs, with time left to measure each and compare the best."""
        left_s = self.budget.left_s
        return min(GRAPHS_SHARE * left_s, MEASURED_SHARE * left_s - graphs * self._trial_s)

    def _cheap_stage_is_over(self, suggestion: Suggestion | None) -> bool:
        """Returns True if the cheap stage has used its time; each trial tells better how much time there is."""
        most = math.inf if self.budget.trials is None else self._cheap_share * self.budget.trials
        spent_s = self.budget.spent_s - self._began_s
        enough_s = min(self._cheap_s, self._cheap_share * (spent_s + self._left_s))
        over = spent_s > enough_s or self.measured >= most
        return suggestion is None or over or _is_hopeless(suggestion, self.study)

    def _is_too_dear(self, policy: Policy) -> bool:
        """Returns True if there is no time for this policy's trial, or if it compiles and nothing compiles here."""
        if policy == self.baseline or not (policy.cudnn_benchmark or policy.compile != "off"):
            return False
        too_little = self._left_for(policy) < self._least_s(policy)
        return too_little or (policy.compile != "off" and cannot_compile(self.study))

    def _measure(self, suggestion: Suggestion) -> str | None:
        """Runs one trial; returns in words why it ends the search, if it does."""
        policy, left_s = suggestion.policy, self._left_for(suggestion.policy)
        if policy == self.baseline or policy in self._compiled:
            left_s = max(left_s, SHORTEST_BASELINE_S)
        enough = policy == self.baseline or left_s >= self._least_s(policy)
        trial = self._try(suggestion, left_s) if enough else None
        if trial is None:
            self._forget(suggestion)
            return OUT_OF_TIME
        self.study.tell(suggestion, trial)
        if isinstance(trial.outcome, Failure) and policy.compile != "off":
            self.study.measure_first(instead_of(policy, trial.outcome, self.study))
        first = self.study.trial_of(self.baseline)
        best = best_of(self.study)
        objective = self.study.yardstick.objective
        self.observer(
            TrialEnded(trial=trial, best=best, baseline=first, left_s=self.budget.left_s, objective=objective)
        )
        if trial is first and self.study.yardstick.score(trial.outcome) is None:
            return "the baseline itself fails" if isinstance(trial.outcome, Failure) else "the baseline has no figure"
        return None

    def _try(self, suggestion: Suggestion, left_s: float) -> Trial | None:
        """Returns the trial, or None if the budget cut it short, which says nothing about the policy."""
        policy = suggestion.policy
        self.observer(TrialStarted(policy=policy))
        longest_s = TRIAL_LIMIT_S if policy.compile == "off" else COMPILED_LIMIT_S
        limit_s = min(longest_s, max(SHORTEST_TRIAL_S, left_s))
        before_s = self.budget.spent_s
        effort = _effort(self.study, policy, limit_s, self.budget.seconds)
        outcome = self.evaluator.measure(policy, effort)
        if policy == self.baseline and isinstance(outcome, Failure) and outcome.kind == "crash":
            outcome = self.evaluator.measure(policy, effort)  # perhaps an accident, and all rests on the baseline
        compile_s = self._compiled.pop(policy, 0.0)
        if isinstance(outcome, Measurement):
            outcome = replace(outcome, startup_s=max(outcome.startup_s, compile_s))
        seconds = self.budget.spent_s - before_s + compile_s
        if isinstance(outcome, Failure) and outcome.kind == "timeout" and limit_s < longest_s:
            return None
        score = self.study.yardstick.score(outcome)
        if isinstance(outcome, Measurement) and score is not None and score < suggestion.least and left_s > 2 * seconds:
            # A surprising score: another program may have been running.
            self.study.add(self._trial(policy, outcome, seconds).row)
            again = self.evaluator.measure(policy, replace(effort, time_limit_s=limit_s - seconds))
            outcome = _of_two(outcome, again)
        return self._trial(policy, outcome, seconds)

    def _trial(self, policy: Policy, outcome: Outcome, seconds: float) -> Trial:
        return Trial(
            number=len(self.study.trials),
            policy=policy,
            outcome=outcome,
            seconds=seconds,
            run=self.run,
            moment_s=self.budget.clock(),
        )

    def _least_s(self, policy: Policy) -> float:
        if policy in self._compiled:
            return 0.0
        outcomes = {trial.policy: trial.outcome for trial in self.study.trials}
        if policy.compile != "off" and not cold_s(policy, outcomes):
            return SHORTEST_DEAR_S  # its graph lies in a cache
        compile_s = max(SHORTEST_COMPILED_S, expected_compile_s(self.graphs_at_once.leaves))
        return _least_s(self.study, policy, compile_s)

    def _forget(self, suggestion: Suggestion | None) -> None:
        if suggestion is not None:
            self.study.forget(suggestion)


def _is_hopeless(suggestion: Suggestion, study: Study) -> bool:
    """Returns True if too little is expected: a trial that takes ten times as long has to promise ten times as much."""
    return suggestion.gain < suggestion.cost * PROMISING and len(study.trials) >= ENOUGH_TRIALS


def _is_as_dear(policy: Policy, other: Policy) -> bool:
    """Returns True if `other` needs at least the kind of trial that there was no time for in the case of `policy`."""
    if policy.compile == "off":
        return other.cudnn_benchmark
    return other.compile != "off" and (other.compile in AUTOTUNED_MODES or policy.compile not in AUTOTUNED_MODES)


def _of_two(first: Measurement, second: Outcome) -> Outcome:
    """Returns the faster measurement, or a failure of the second: a policy that sometimes fails is not for training.

    Startup time and graph breaks come from the first one, as the second finds the graph compiled and reports neither.
    """
    if isinstance(second, Failure):
        return first if second.kind == "timeout" else second
    faster = max(first, second, key=lambda one: one.samples_per_s)
    return replace(faster, startup_s=max(first.startup_s, second.startup_s), graph_breaks=first.graph_breaks)


def _least_s(study: Study, policy: Policy, compile_s: float) -> float:
    """Returns the least seconds of a trial like this one: a time limit that it cannot keep would waste time.

    DenseNet-161 was given 42 s to compile on an H200 where it takes 90, and they were lost (reports/h200/rivals/first).
    """
    dear = (policy.cudnn_benchmark, policy.compile)
    alike = [t.seconds for t in study.trials if (t.policy.cudnn_benchmark, t.policy.compile) == dear]
    if len(alike) > 1:
        return min(alike)
    if policy.compile != "off":
        unknown_s = max(SHORTEST_AUTOTUNED_S, compile_s) if policy.compile in AUTOTUNED_MODES else compile_s
    else:
        unknown_s = SHORTEST_DEAR_S if policy.cudnn_benchmark else SHORTEST_TRIAL_S
    return min([unknown_s, *alike])  # a single one includes its worker's start, so the next takes no more


def _effort(study: Study, policy: Policy, limit_s: float, budget_s: float) -> Effort:
    """Returns how long to measure a policy: only briefly if it is hopelessly slow and its speed decides.

    A policy that uses little energy may be slow, and only a longer block shows that.
    """
    yardstick = study.yardstick
    effort = yardstick.objective.effort(Effort(time_limit_s=limit_s, energy_s=ENERGY_S))
    best = best_of(study)
    if best is None or not isinstance(best.outcome, Measurement):
        return effort
    steady_s = STRETCHES * max(STRETCH_S, best.outcome.median_ms / 1000)
    effort = replace(effort, warmup_s=min(effort.warmup_s, max(WARMUP_SHARE * budget_s, steady_s)))
    if yardstick.objective.name == "energy":
        return effort
    same = policy.batch_size == best.policy.batch_size and policy.accumulate == best.policy.accumulate
    if not same and policy.batch_size is None:
        return effort
    samples = best.outcome.samples_per_step if same else (policy.batch_size or 1) * policy.accumulate
    enough = best.samples_per_s / yardstick.share_of_needed_speed(best.outcome)
    return replace(effort, abandon_above_ms=HOPELESS * 1000 * samples / enough)
