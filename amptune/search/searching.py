"""The search loop: ask for a policy, measure it, tell; until the budget or the space is used up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.measure.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.budget import Budget
from amptune.search.events import Observer, SearchEnded, TrialEnded, TrialStarted
from amptune.search.study import Study, Suggestion
from amptune.search.trial import Trial

__all__ = ["best_of", "search"]

# An expected improvement below this share is not worth a trial, once there are enough to expect anything from.
PROMISING = 0.0003
ENOUGH_TRIALS = 20
# A step this many times slower than the best, per sample, is not looked at for long.
HOPELESS = 2.0
TRIAL_LIMIT_S = 120.0
# cudnn.benchmark times every algorithm for every shape: 5 to 20 s for each dtype and layout of a convolution
# network, where a trial takes 1.5 s without (measured on an H200, torch 2.11). So the search does without it at
# first, for this share of its time, and then tries it on the fastest.
CHEAP = {"cudnn_benchmark": False}
CHEAP_SHARE = 0.6
DEAR_VARIANTS = 4
SHORTEST_DEAR_S = 5.0
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
) -> None:
    """Measures what the study suggests, one policy after another, and leaves `reserve_s()` of the budget unspent.

    The baseline comes first. Every outcome is in the study when this returns.
    """
    measured_before = len(study.trials)
    try:
        because = _search_until(study, evaluator, budget, baseline, reserve_s, observer)
    except StudyError as error:  # a storage that fails ends the search; what is in memory still decides
        because = str(error)
    observer(SearchEnded(because=because, trials=len(study.trials) - measured_before))


def best_of(study: Study) -> Trial | None:
    """The fastest trial so far."""
    alive = [trial for trial in study.trials if isinstance(trial.outcome, Measurement)]
    return max(alive, key=lambda trial: trial.samples_per_s, default=None)


def _search_until(
    study: Study,
    evaluator: Evaluator,
    budget: Budget,
    baseline: Policy,
    reserve_s: Callable[[], float],
    observer: Observer,
) -> str:
    """Searches until there is a reason to stop, and returns it in words."""
    measured_before = len(study.trials)
    last = None if budget.trials is None else measured_before + budget.trials
    cheap_trials = math.inf if budget.trials is None else measured_before + CHEAP_SHARE * budget.trials
    fixed = dict(CHEAP) if all(map(study.has_knob, CHEAP)) else {}
    cheap_until_s = budget.spent_s + CHEAP_SHARE * (budget.left_s - reserve_s())
    while len(study.trials) != last:
        # With the baseline alone there is nothing to compare yet, and so nothing to keep time for.
        left_s = budget.left_s - (reserve_s() if len(study.trials) > 1 else 0.0)
        if study.trial_of(baseline) is not None and left_s < SHORTEST_TRIAL_S:
            return "the budget for searching is spent"
        suggestion = study.suggest(fixed)
        hopeless = suggestion is not None and _is_hopeless(suggestion, study)
        if fixed and (
            suggestion is None or hopeless or budget.spent_s > cheap_until_s or len(study.trials) >= cheap_trials
        ):
            if suggestion is not None:
                study.forget(suggestion)
            study.measure_first(_dear_variants(study))
            fixed = {}
            continue
        if suggestion is None:
            return "every policy of the space is measured"
        if hopeless:
            study.forget(suggestion)
            return "no policy that is left promises to be faster"
        if suggestion.policy == baseline:
            left_s = max(left_s, SHORTEST_BASELINE_S)
        enough = suggestion.policy == baseline or left_s >= _least_s(study, suggestion.policy)
        trial = _try(study, suggestion, evaluator, budget, left_s, observer) if enough else None
        if trial is None:
            study.forget(suggestion)
            return "the budget for searching is spent"
        study.tell(suggestion, trial)
        first = study.trial_of(baseline)
        observer(TrialEnded(trial=trial, best=best_of(study), baseline=first, left_s=budget.left_s))
        if trial is first and isinstance(trial.outcome, Failure):
            return "the baseline itself fails"
    return f"the {budget.trials} trials allowed are done"


def _is_hopeless(suggestion: Suggestion, study: Study) -> bool:
    return suggestion.gain < PROMISING and len(study.trials) >= ENOUGH_TRIALS


def _dear_variants(study: Study) -> list[Policy]:
    """With cudnn.benchmark: the fastest policies so far that differ in dtype or layout, and so in their plans."""
    fastest: dict[tuple[str, str], Policy] = {}
    for trial in sorted(study.trials, key=lambda trial: -trial.samples_per_s):
        fastest.setdefault((trial.policy.autocast, trial.policy.memory_format), trial.policy)
    variants = (replace(policy, cudnn_benchmark=True) for policy in fastest.values())
    return [policy for policy in variants if policy in study][:DEAR_VARIANTS]


def _try(
    study: Study, suggestion: Suggestion, evaluator: Evaluator, budget: Budget, left_s: float, observer: Observer
) -> Trial | None:
    """The trial, or None where the budget and not the policy cut it short: that says nothing about the policy."""
    observer(TrialStarted(policy=suggestion.policy))
    limit_s = min(TRIAL_LIMIT_S, max(SHORTEST_TRIAL_S, left_s))
    before_s = budget.spent_s
    effort = _effort(study, suggestion.policy, limit_s)
    outcome = evaluator.measure(suggestion.policy, effort)
    seconds = budget.spent_s - before_s
    if isinstance(outcome, Failure) and outcome.kind == "timeout" and limit_s < TRIAL_LIMIT_S:
        return None
    if isinstance(outcome, Measurement) and outcome.samples_per_s < suggestion.least and left_s > 2 * seconds:
        # A surprise: something else may have been running.
        again = evaluator.measure(suggestion.policy, replace(effort, time_limit_s=limit_s - seconds))
        outcome = _of_two(outcome, again)
    return Trial(number=len(study.trials), policy=suggestion.policy, outcome=outcome, seconds=seconds)


def _of_two(first: Measurement, second: Outcome) -> Outcome:
    """The faster one; but a policy that fails now and then is no policy to train with."""
    if isinstance(second, Failure):
        return first if second.kind == "timeout" else second
    return max(first, second, key=lambda one: one.samples_per_s)


def _least_s(study: Study, policy: Policy) -> float:
    """What a trial like this one takes at the least: a time limit that it cannot keep would be time lost."""
    dear = (policy.cudnn_benchmark, policy.compile)
    alike = [t.seconds for t in study.trials if (t.policy.cudnn_benchmark, t.policy.compile) == dear]
    is_dear = policy.cudnn_benchmark or policy.compile != "off"
    if len(alike) > 1:  # the first one pays for its worker's start
        return min(alike)
    return SHORTEST_DEAR_S if is_dear else SHORTEST_TRIAL_S


def _effort(study: Study, policy: Policy, limit_s: float) -> Effort:
    best = best_of(study)
    if best is None or not isinstance(best.outcome, Measurement):
        return Effort(time_limit_s=limit_s)
    same = policy.batch_size == best.policy.batch_size and policy.accumulate == best.policy.accumulate
    if not same and policy.batch_size is None:
        return Effort(time_limit_s=limit_s)
    samples = best.outcome.samples_per_step if same else (policy.batch_size or 1) * policy.accumulate
    return Effort(time_limit_s=limit_s, abandon_above_ms=HOPELESS * 1000 * samples / best.samples_per_s)
