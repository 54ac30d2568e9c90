"""The trials of an Optuna study: those that have ended, and those that run now."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from amptune.measure.results.outcome import outcome_from_dict
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import Policy
from amptune.search.table.trial import Trial

__all__ = ["running_in", "trials_in"]

# The run of trials that an earlier amptune made.
_FORMER = "former"
# A trial that has run for longer was left by a worker that was killed.
LONGEST_TRIAL_S = 1800.0
# Another worker takes no longer from asking for a trial to naming its policy; until then it counts as running.
ASKING_S = 5.0


def trials_in(study: optuna.Study, besides: Collection[int] = ()) -> list[Trial]:
    """Returns the trials of an Optuna study that have an outcome, except the numbers `besides`, as they ended."""
    return list(_remembered(study, besides))


def running_in(study: optuna.Study) -> dict[int, Policy | None]:
    """Returns the policies of the trials that run now, by the trial's number; None for one that is being chosen."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    ages_s = {one.number: _age_s(one) for one in running}
    named = {one.number: one.user_attrs.get("policy") for one in running if ages_s[one.number] < LONGEST_TRIAL_S}
    return {
        number: None if attribute is None else policy_from_dict(attribute)
        for number, attribute in named.items()
        if attribute is not None or ages_s[number] < ASKING_S
    }


def _age_s(trial: FrozenTrial) -> float:
    """Returns the seconds since a trial began. Optuna stores the local time, without a time zone."""
    began = trial.datetime_start
    return math.inf if began is None else (datetime.now() - began).total_seconds()


def _remembered(study: optuna.Study, besides: Collection[int]) -> Iterator[Trial]:
    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    for frozen in sorted(ended, key=lambda one: (one.datetime_complete or datetime.max, one.number)):
        attributes: Mapping[str, Any] = frozen.user_attrs
        if "outcome" in attributes and frozen.number not in besides:
            yield Trial(
                number=frozen.number,
                policy=policy_from_dict(attributes["policy"]),
                outcome=outcome_from_dict(attributes["outcome"]),
                seconds=attributes["seconds"],
                run=attributes.get("run", _FORMER),
                moment_s=attributes.get("moment_s", _began_s(frozen)),
            )


def _began_s(frozen: FrozenTrial) -> float:
    return frozen.datetime_start.timestamp() if frozen.datetime_start is not None else 0.0
