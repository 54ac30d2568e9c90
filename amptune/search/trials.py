"""Trials: the policies that are measured one after another, each briefly, as the study suggests them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import ENERGY_S, Effort, Failure, Measurement, Outcome
from amptune.policy.settings import AUTOTUNED_MODES, Policy
from amptune.search.compiled_graphs import (
    BEHIND,
    GUESSED_TRIAL_S,
    IN_A_TRIAL,
    CompiledGraphs,
    cannot_compile,
    instead_of,
    typical_s,
)
from amptune.search.events import Observer, TrialEnded
from amptune.search.narrowing import BLOCK, MEASURING_LIMIT_S
from amptune.search.plan.budget import SHORT_S, Budget
from amptune.search.plan.plan import WORTHWHILE, Step
from amptune.search.sampler.study import Study
from amptune.search.sampler.suggestion import Suggestion
from amptune.search.table.trial import Trial

__all__ = ["Trials", "best_of"]

# With fewer trials nothing is known well enough to end the search.
ENOUGH_TRIALS = 20
# The first trials differ most, stock PyTorch, a recipe and recorded CUDA graphs, and wait for no graph.
OF_EACH_KIND = 3
# A policy whose step is this many times slower than the best, per sample, is measured only briefly.
HOPELESS = 2.0
COMPILED_LIMIT_S = 600.0
BRIEF = Effort(warmup_s=2.0, energy_s=ENERGY_S)


def best_of(study: Study) -> Trial | None:
    """Returns the best trial so far that is fast enough for the objective, or None."""
    yardstick = study.yardstick
    alive = (trial for trial in study.trials if yardstick.allows(trial.outcome))
    return max(alive, key=lambda trial: yardstick.score(trial.outcome) or 0.0, default=None)


@dataclass
class Trials:
    """The trials of a run: the baseline, policies that were put first, graphs that are ready, then the sampler's."""

    study: Study
    evaluator: Evaluator
    budget: Budget
    baseline: Policy
    observer: Observer
    graphs: CompiledGraphs

    def __post_init__(self) -> None:
        self._held: tuple[int, Suggestion] | None = None
        self.has_failed = False

    def anchor(self) -> None:
        """Measures the baseline in this run if only former runs did: no two runs are compared with each other."""
        known = self.study.trial_of(self.baseline)
        if known is None or any(row.policy == self.baseline and row.run == self.study.run for row in self.study.table):
            return
        limit_s = max(SHORT_S, self.budget.left_s)
        effort = self.study.yardstick.objective.effort(replace(BLOCK, time_limit_s=limit_s))
        outcome = self.evaluator.measure(self.baseline, effort)
        if isinstance(outcome, Measurement):
            self.study.add(replace(known.row, outcome=outcome, run=self.study.run, moment_s=self.budget.clock()))

    def wants(self, free_s: float) -> Step | None:
        """Returns the step that measures the next policy."""
        if self.has_failed or not self._may_go_on:
            return None
        if self.study.trial_of(self.baseline) is None:
            first = self._suggestion()
            return None if first is None else self._step(first, free_s)
        ready = self.graphs.next_ready()
        if ready is not None:
            return Step(
                stage="trial",
                what=str(ready[0].policy),
                seconds=typical_s(self.study),
                worth=math.inf,
                policies=(ready[0].policy,),
                is_needed=typical_s(self.study) <= self.budget.left_s,  # it may be worth more than all that is compared
            )
        while typical_s(self.study) <= free_s and (suggestion := self._suggestion()) is not None:
            if self._seconds(suggestion) <= free_s and not self._cannot_run(suggestion.policy):
                return self._step(suggestion, free_s)
            if not (suggestion.policy.cudnn_benchmark or suggestion.policy.compile != "off"):
                return None
            self.drop()
            self.study.leave_out(partial(_is_as_dear, suggestion.policy))
        return None

    def compiling(self, free_s: float) -> Step | None:
        """Returns the step that compiles a policy in its trial, if graphs cannot compile in the background."""
        if self.has_failed or not self._may_go_on or self.graphs.behind or self.study.trial_of(self.baseline) is None:
            return None
        suggestion = self.graphs.suggestion(free_s)
        if suggestion is None or self._seconds(suggestion) > free_s:
            return None
        return self._step(suggestion, free_s)

    def ended_because(self) -> str:
        """Returns in words why no more policies are measured."""
        first = self.study.trial_of(self.baseline)
        if first is not None and self.has_failed:
            return "the baseline itself fails" if isinstance(first.outcome, Failure) else "the baseline has no figure"
        if first is None and self.has_failed:
            return "the baseline takes longer than the budget"
        if not self._may_go_on:
            return f"all trials that are allowed are done: {self.budget.trials}"
        suggestion = self._suggestion()
        self.drop()
        if suggestion is None:
            left_out = "what is left of the space does not fit, takes too much time, or cannot be compiled here"
            return left_out if self.study.has_left_out else "every policy of the space is measured"
        seconds = self._seconds(suggestion)
        if suggestion.gain < WORTHWHILE * seconds:
            return "nothing that is left to try promises to be better"
        return "the budget for searching is spent"

    @property
    def _may_go_on(self) -> bool:
        return self.budget.trials_left(self.study.measured) > 0

    def _suggestion(self) -> Suggestion | None:
        """Returns the suggestion to measure next, the same one until another trial has ended."""
        count = len(self.study.trials)
        if self._held is None or self._held[0] != count:
            self.drop()
            begun = self.study.trial_of(self.baseline) is not None
            found = self.study.suggest(modes=IN_A_TRIAL) if begun else self.study.suggest(wanted=self.baseline)
            self._held = None if found is None else (count, found)
        return None if self._held is None else self._held[1]

    def drop(self) -> None:
        """Gives back the policy that was suggested and is not begun."""
        if self._held is not None:
            self.study.forget(self._held[1])
            self._held = None

    def _step(self, suggestion: Suggestion, free_s: float) -> Step:
        gain = self.graphs.gain(suggestion) if suggestion.policy.compile in BEHIND else suggestion.gain
        is_early = len(self.study.trials) < (OF_EACH_KIND if self.graphs.is_urgent(free_s) else ENOUGH_TRIALS)
        least = 2 * WORTHWHILE * self._seconds(suggestion) if is_early else 0.0
        is_needed = suggestion.policy == self.baseline
        return Step(
            stage="trial",
            what=str(suggestion.policy),
            seconds=self._seconds(suggestion),
            worth=math.inf if is_needed else max(gain, least),
            policies=(suggestion.policy,),
            is_needed=is_needed,
        )

    def _seconds(self, suggestion: Suggestion) -> float:
        """Returns the seconds that a trial is expected to take."""
        policy = suggestion.policy
        compile_s = self.graphs.seconds(policy) if policy.compile != "off" else 0.0
        return max(suggestion.seconds or 0.0, typical_s(self.study) + compile_s)

    def _cannot_run(self, policy: Policy) -> bool:
        return policy.compile != "off" and cannot_compile(self.study)

    def take(self, step: Step, limit_s: float) -> None:
        """Measures the policy that was wanted: in the process where it was compiled, if its graph is ready.

        If compiling it failed, that is told; if it lacked memory beside the others or was killed, it is compiled again,
        in its trial.
        """
        (policy,) = step.policies
        suggestion, result = self.graphs.taken(policy) or (self._suggested(policy), 0.0)
        if isinstance(result, Failure) and result.kind not in ("oom", "killed"):
            self._tell(suggestion, self._trial(policy, result, 0.0))
        else:
            self._measure(suggestion, limit_s, compile_s=0.0 if isinstance(result, Failure) else result)

    def _suggested(self, policy: Policy) -> Suggestion:
        held = (self._held and self._held[1], self.graphs.held)
        return next(one for one in held if one is not None and one.policy == policy)

    def _measure(self, suggestion: Suggestion, limit_s: float, compile_s: float) -> None:
        """Runs one trial. One that the budget cut short says nothing about the policy, which is then left out."""
        self.graphs.release(suggestion)
        if self._held is not None and self._held[1] is suggestion:
            self._held = None
        try:
            trial = self._try(suggestion, limit_s, compile_s)
        except BaseException:
            with suppress(StudyError):
                self.study.forget(suggestion)
            raise
        if trial is None:
            self.study.forget(suggestion)
            self.has_failed = suggestion.policy == self.baseline  # it would be cut short again
            self.study.leave_out(lambda policy: policy == suggestion.policy)
        else:
            self._tell(suggestion, trial)

    def _tell(self, suggestion: Suggestion, trial: Trial) -> None:
        self.study.tell(suggestion, trial)
        if isinstance(trial.outcome, Failure) and trial.policy.compile != "off":
            self.study.measure_first(instead_of(trial.policy, trial.outcome, self.study))
        first = self.study.trial_of(self.baseline)
        objective = self.study.yardstick.objective
        self.observer(
            TrialEnded(
                trial=trial, best=best_of(self.study), baseline=first, left_s=self.budget.left_s, objective=objective
            )
        )
        self.has_failed = trial is first and self.study.yardstick.score(trial.outcome) is None

    def _try(self, suggestion: Suggestion, left_s: float, compile_s: float) -> Trial | None:
        """Returns the trial, or None if the budget cut it short."""
        policy = suggestion.policy
        longest_s = MEASURING_LIMIT_S if policy.compile == "off" or compile_s > 0 else COMPILED_LIMIT_S
        limit_s = min(longest_s, max(SHORT_S if policy == self.baseline else GUESSED_TRIAL_S, left_s))
        before_s = self.budget.spent_s
        effort = replace(_effort(self.study, policy, limit_s), beside_compiling=self._may_be_disturbed(policy, left_s))
        outcome = self.evaluator.measure(policy, effort)
        if policy == self.baseline and isinstance(outcome, Failure) and outcome.kind == "crash":
            outcome = self.evaluator.measure(policy, effort)  # perhaps an accident, and all rests on the baseline
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

    def _may_be_disturbed(self, policy: Policy, free_s: float) -> bool:
        """Returns True if graphs would come too late for standing still, which are worth more than this figure."""
        return policy.compile == "off" and policy != self.baseline and self.graphs.is_urgent(free_s)

    def _trial(self, policy: Policy, outcome: Outcome, seconds: float) -> Trial:
        number, run, moment_s = len(self.study.trials), self.study.run, self.budget.clock()
        return Trial(number=number, policy=policy, outcome=outcome, seconds=seconds, run=run, moment_s=moment_s)


def _is_as_dear(policy: Policy, other: Policy) -> bool:
    """Returns True if `other` needs at least the kind of trial that there was no time for in the case of `policy`."""
    if policy.compile == "off":
        return other.cudnn_benchmark
    return other.compile != "off" and (other.compile in AUTOTUNED_MODES or policy.compile not in AUTOTUNED_MODES)


def _of_two(first: Measurement, second: Outcome) -> Outcome:
    """Returns the second measurement, also if it failed: a policy that sometimes fails is not for training.

    Startup time and graph breaks come from the first one, as the second finds the graph compiled and reports neither.
    """
    if isinstance(second, Failure):
        return first if second.kind == "timeout" else second
    return replace(second, startup_s=max(first.startup_s, second.startup_s), graph_breaks=first.graph_breaks)


def _effort(study: Study, policy: Policy, limit_s: float) -> Effort:
    """Returns how long to measure a policy: only briefly if it is hopelessly slow and its speed decides.

    A policy that uses little energy may be slow, and only a longer block shows that.
    """
    yardstick = study.yardstick
    effort = yardstick.objective.effort(replace(BRIEF, time_limit_s=limit_s))
    best = best_of(study)
    if best is None or not isinstance(best.outcome, Measurement) or yardstick.objective.name == "energy":
        return effort
    same = policy.batch_size == best.policy.batch_size and policy.accumulate == best.policy.accumulate
    if not same and policy.batch_size is None:
        return effort
    own = (policy.batch_size or 1) * policy.accumulate * best.outcome.devices
    samples = best.outcome.samples_per_step if same else own
    enough = best.samples_per_s / yardstick.share_of_needed_speed(best.outcome)
    return replace(effort, abandon_above_ms=HOPELESS * 1000 * samples / enough)
