"""The search loop: ask for a policy, measure it, tell; until the budget or the space is used up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.measure.outcome import ENERGY_S, Effort, Failure, Measurement, Outcome
from amptune.policy.settings import AUTOTUNED_MODES, Policy
from amptune.search.budget import Budget
from amptune.search.compile_costs import cold_s, expected_compile_s
from amptune.search.events import Compiling, Observer, SearchEnded, TrialEnded, TrialStarted
from amptune.search.graphs import (
    GraphsAtOnce,
    best_of_dtypes,
    cannot_compile,
    instead_of,
    one_of_each_kind,
)
from amptune.search.study import Study, Suggestion
from amptune.search.trial import Trial

__all__ = ["best_of", "search"]

# An expected improvement below this share is not worth a trial, once there are enough to expect anything from.
PROMISING = 0.0003
ENOUGH_TRIALS = 20
# A step this many times slower than the best, per sample, is not looked at for long.
HOPELESS = 2.0
TRIAL_LIMIT_S, COMPILED_LIMIT_S = 120.0, 600.0
# Of the budget, for the warm-up of one trial at the most: where the host is busy no step time ever is steady. Of 108 s
# three trials of DeepLabV3+ on such a host of an H200 took 14 s to wait for that in vain. But no less than it takes to
# see it: three stretches of 0.1 s or a step each, and one to spare.
WARMUP_SHARE = 1 / 60
STRETCHES, STRETCH_S = 4, 0.1
# cudnn.benchmark times every algorithm for every shape: 10 to 25 s for each dtype and layout of a convolution network,
# where a trial takes 1.2 s without (ResNet-50 on an H200, torch 2.11, reports/h200/oracle); torch.compile takes 25 to
# 40 s. So the search does without them at first: for this share of its time, and no longer than this; where batch sizes
# are searched, for a larger one (reports/samplers.json).
CHEAP = {"cudnn_benchmark": False, "compile": "off"}
CHEAP_SHARE, CHEAP_S, CHEAP_SHARE_WITH_SIZES = 0.35, 40.0, 0.5
# What a trial takes at the least, where none like it was seen; one that is compiled more, where the model is large.
SHORTEST_DEAR_S, SHORTEST_COMPILED_S, SHORTEST_AUTOTUNED_S = 5.0, 25.0, 150.0
# Of the time kept for comparisons, for the first policy that is compiled and those that come soon; and for measuring
# what was compiled ahead. Of all the time left, for compiling several graphs beside one another; and for measuring
# them besides.
BORROWED, BORROWED_FOR_COMPILED, GRAPHS_SHARE, MEASURED_SHARE = 0.4, 0.7, 0.6, 0.8
# What comes soon comes before what is compiled, where it takes no more than this share of what is left.
SOON_SHARE = 0.15
# Of the trials that are allowed, those that are compiled before all others.
GRAPHS_OF_TRIALS = 0.25
OUT_OF_TIME = "the budget for searching is spent"
THE_REST_IS_LEFT_OUT = "what is left of the space does not fit, takes too much time, or cannot be compiled here"
# Less than this is not enough for a trial in a worker that already runs.
SHORTEST_TRIAL_S = 3.0
# Without the baseline there is no answer, so it gets this much even where little of the budget is left.
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
) -> None:
    """Measures what the study suggests, one policy after another, and leaves `reserve_s()` of the budget unspent.

    The baseline comes first, then what is to come `soon` and, where several graphs can be compiled beside one another,
    one of each kind; these before those where trials take long. For both some of what is kept may be spent. Every
    outcome is in the study when this returns.
    """
    run = _Search(study, evaluator, budget, baseline, reserve_s, observer, soon, graphs_at_once or GraphsAtOnce())
    try:
        because = run.until_done()
    except StudyError as error:  # a storage that fails ends the search; what is in memory still decides
        because = str(error)
    observer(SearchEnded(because=because, trials=run.measured, left_s=budget.left_s))


def best_of(study: Study) -> Trial | None:
    """The best trial so far; none that is too slow for the objective."""
    yardstick = study.yardstick
    alive = (trial for trial in study.trials if yardstick.allows(trial.outcome))
    return max(alive, key=lambda trial: yardstick.score(trial.outcome) or 0.0, default=None)


@dataclass
class _Search:
    """One search: the baseline, the known-good policies and the first CUDA graphs; a compiled graph of each kind, where
    several compile at once; then cheap trials, then dear ones on the best of those, then whatever promises most for its
    time.
    """

    study: Study
    evaluator: Evaluator
    budget: Budget
    baseline: Policy
    reserve_s: Callable[[], float]
    observer: Observer
    soon: Collection[Policy]
    graphs_at_once: GraphsAtOnce

    def __post_init__(self) -> None:
        self._known = len(self.study.trials)
        # The settings of the cheap stage; empty in the stage behind it.
        self._fixed = {name: value for name, value in CHEAP.items() if self.study.has_knob(name)}
        sizes = self.study.has_knob("batch_size")
        self._cheap_share, self._cheap_s = (CHEAP_SHARE_WITH_SIZES, math.inf) if sizes else (CHEAP_SHARE, CHEAP_S)
        self._began_s = self.budget.spent_s
        self._looked_ahead = False
        # What was compiled ahead of its trial, and the seconds that took; what is kept at most, where none was ready.
        self._compiled: dict[Policy, float] = {}
        self._most_kept_s = math.inf

    @property
    def measured(self) -> int:
        """How many trials this search made."""
        return len(self.study.trials) - self._known

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
        """With the baseline alone there is nothing to compare yet, and so nothing to keep time for."""
        return self.budget.left_s - (self._reserve_s if len(self.study.trials) > 1 else 0.0)

    @property
    def _reserve_s(self) -> float:
        """Where graphs took their time for nothing, no more than half of what is left: something is to be compared."""
        return min(self.reserve_s(), self._most_kept_s)

    def _is_out_of_time(self) -> bool:
        """Not while there is something that was compiled, or what comes soon can still borrow."""
        needs_more = any(self.study.trial_of(policy) is None for policy in self.soon)
        left_s = self._left_s + (BORROWED * self._reserve_s if needs_more else 0.0)
        return not self._compiled and left_s < SHORTEST_TRIAL_S

    def _left_for(self, policy: Policy) -> float:
        """The first graphs may make more of a difference than a few launches more to compare.

        Of what comes soon the best is to be compared in them.
        """
        is_first = policy.compile != "off" and all(trial.policy.compile == "off" for trial in self.study.trials)
        share = BORROWED if is_first or policy in self.soon else 0.0
        return self._left_s + self._reserve_s * (BORROWED_FOR_COMPILED if policy in self._compiled else share)

    @property
    def _trial_s(self) -> float:
        """What a trial takes as a rule."""
        return median(trial.seconds for trial in self.study.trials)

    def _is_to_look_ahead(self, suggestion: Suggestion | None) -> bool:
        """Behind what comes soon, if that takes little: on a slow host graphs may not be ready in their time.

        DenseNet-161 lost 95 s so, and had one policy to compare with stock PyTorch (an H200, a budget of 215 s).
        """
        if self._looked_ahead or suggestion is None or suggestion.policy not in self.soon:
            return not self._looked_ahead
        count = sum(self.study.trial_of(policy) is None for policy in self.soon)
        return count * self._trial_s > SOON_SHARE * self.budget.left_s

    def _compile_ahead(self, baseline: Outcome) -> None:
        """Compiles one policy of each kind beside one another, to be measured next: where two or more can be.

        Not where memory is to be saved, which CUDA graphs need more of.
        """
        if not isinstance(baseline, Measurement) or self.study.yardstick.objective.name == "memory":
            return
        kinds = one_of_each_kind(self.study, self.baseline)
        trials = math.inf if self.budget.trials is None else GRAPHS_OF_TRIALS * self.budget.trials
        policies = kinds[: int(min(trials, self.graphs_at_once.within(self._enough_s, baseline)))]
        if len(policies) > 1:
            self.observer(Compiling(policies=tuple(policies), left_s=self.budget.left_s))
            self._compiled = dict(self.evaluator.compile(policies, GRAPHS_SHARE * self.budget.left_s))
            self._began_s = self.budget.spent_s  # the cheap trials have their time still
            if not self._compiled:
                self._most_kept_s = max(0.0, self.budget.left_s / 2)
            self.study.measure_next([policy for policy in policies if policy in self._compiled])

    def _enough_s(self, graphs: int) -> float:
        """The time to compile so many in, such that each can be measured, and the best be compared with others."""
        left_s = self.budget.left_s
        return min(GRAPHS_SHARE * left_s, MEASURED_SHARE * left_s - graphs * self._trial_s)

    def _cheap_stage_is_over(self, suggestion: Suggestion | None) -> bool:
        """What is kept for the comparisons is known better with each trial, and so is the time there is."""
        most = math.inf if self.budget.trials is None else self._cheap_share * self.budget.trials
        spent_s = self.budget.spent_s - self._began_s
        enough_s = min(self._cheap_s, self._cheap_share * (spent_s + self._left_s))
        over = spent_s > enough_s or self.measured >= most
        return suggestion is None or over or _is_hopeless(suggestion, self.study)

    def _is_too_dear(self, policy: Policy) -> bool:
        """Whether there is no time for such a trial, but for others there may be; or nothing can be compiled here."""
        if policy == self.baseline or not (policy.cudnn_benchmark or policy.compile != "off"):
            return False
        too_little = self._left_for(policy) < self._least_s(policy)
        return too_little or (policy.compile != "off" and cannot_compile(self.study))

    def _measure(self, suggestion: Suggestion) -> str | None:
        """One trial; in words why it ends the search, if it does."""
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
        """The trial, or None where the budget and not the policy cut it short: that says nothing about the policy."""
        policy = suggestion.policy
        self.observer(TrialStarted(policy=policy))
        longest_s = TRIAL_LIMIT_S if policy.compile == "off" else COMPILED_LIMIT_S
        limit_s = min(longest_s, max(SHORTEST_TRIAL_S, left_s))
        before_s = self.budget.spent_s
        effort = _effort(self.study, policy, limit_s, self.budget.seconds)
        outcome = self.evaluator.measure(policy, effort)
        if policy == self.baseline and isinstance(outcome, Failure) and outcome.kind == "crash":
            outcome = self.evaluator.measure(policy, effort)  # it may have been an accident, and all rests on this one
        compile_s = self._compiled.pop(policy, 0.0)
        if isinstance(outcome, Measurement):
            outcome = replace(outcome, startup_s=max(outcome.startup_s, compile_s))
        seconds = self.budget.spent_s - before_s + compile_s
        if isinstance(outcome, Failure) and outcome.kind == "timeout" and limit_s < longest_s:
            return None
        score = self.study.yardstick.score(outcome)
        if isinstance(outcome, Measurement) and score is not None and score < suggestion.least and left_s > 2 * seconds:
            # A surprise: something else may have been running.
            again = self.evaluator.measure(policy, replace(effort, time_limit_s=limit_s - seconds))
            outcome = _of_two(outcome, again)
        return Trial(number=len(self.study.trials), policy=policy, outcome=outcome, seconds=seconds)

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
    """A trial that takes ten times as long has to promise ten times as much."""
    return suggestion.gain < suggestion.cost * PROMISING and len(study.trials) >= ENOUGH_TRIALS


def _is_as_dear(policy: Policy, other: Policy) -> bool:
    """Whether another takes as much time as a policy for which there is too little."""
    if policy.compile == "off":
        return other.cudnn_benchmark
    return other.compile != "off" and (other.compile in AUTOTUNED_MODES or policy.compile not in AUTOTUNED_MODES)


def _of_two(first: Measurement, second: Outcome) -> Outcome:
    """The faster one; but a policy that fails now and then is no policy to train with.

    What was compiled for the first is there for the second, which would say that it took no time and broke nowhere.
    """
    if isinstance(second, Failure):
        return first if second.kind == "timeout" else second
    faster = max(first, second, key=lambda one: one.samples_per_s)
    return replace(faster, startup_s=max(first.startup_s, second.startup_s), graph_breaks=first.graph_breaks)


def _least_s(study: Study, policy: Policy, compile_s: float) -> float:
    """What a trial like this one takes at the least: a time limit that it cannot keep would be time lost.

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
    return min([unknown_s, *alike])  # the first one pays for its worker's start: the next may take less, and no more


def _effort(study: Study, policy: Policy, limit_s: float, budget_s: float) -> Effort:
    """How long to look at a policy; not for long at one that is hopelessly slow, if its speed is what decides.

    What uses little energy may be slow, and is known by a longer look alone.
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
