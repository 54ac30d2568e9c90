"""Optuna's side of a study: the space's knobs as distributions, the trials that ended, and those that run."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from amptune.measure.results.outcome import outcome_from_dict
from amptune.policy.serialization import finite, policy_from_dict, text
from amptune.policy.settings import Policy
from amptune.search.space.knobs import BATCH_SIZE, Dimension, Space
from amptune.search.table.trial import Trial

__all__ = ["distributions_of", "running_in", "suggest", "trials_in"]

# Larger than any batch.
LARGEST_BATCH = 2**31


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Returns Optuna's form of each knob's choices."""
    return {knob.name: _distribution(knob) for knob in space.knobs}


def _distribution(knob: Dimension) -> BaseDistribution:
    """Returns Optuna's form of the choices: a range of integers, or categories; for batch sizes any integer."""
    choices: tuple[Any, ...] = knob.choices
    if knob.name == BATCH_SIZE:
        return IntDistribution(1, LARGEST_BATCH, log=True)
    whole = [choice for choice in choices if isinstance(choice, int) and not isinstance(choice, bool)]
    if len(whole) == len(choices) and whole == list(range(whole[0], whole[-1] + 1)):
        return IntDistribution(whole[0], whole[-1])
    return CategoricalDistribution(choices)


def suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> None:
    """Gives a trial a parameter, as the study's sampler has it."""
    if isinstance(distribution, CategoricalDistribution):
        trial.suggest_categorical(name, distribution.choices)
    elif isinstance(distribution, IntDistribution):
        trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)


def trials_in(study: optuna.Study, besides: Collection[int] = ()) -> list[Trial]:
    """Returns the complete trials of an Optuna study, except the numbers `besides`, as they ended."""
    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [
        Trial(
            number=one.number,
            policy=policy_from_dict(one.user_attrs["policy"]),
            outcome=outcome_from_dict(one.user_attrs["outcome"]),
            seconds=finite(one.user_attrs["seconds"]),
            run=text(one.user_attrs["run"]),
            moment_s=finite(one.user_attrs["moment_s"]),
        )
        for one in sorted(ended, key=lambda one: (one.datetime_complete or datetime.max, one.number))
        if one.number not in besides
    ]


def running_in(study: optuna.Study) -> dict[int, Policy | None]:
    """Returns the policies of the trials that run now, by the trial's number; None for one that is being chosen."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    named = {one.number: one.user_attrs.get("policy") for one in running}
    return {number: None if policy is None else policy_from_dict(policy) for number, policy in named.items()}
