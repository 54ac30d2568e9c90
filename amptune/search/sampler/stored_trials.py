"""The trials of an Optuna study that have ended."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import optuna
from optuna.trial import TrialState

from amptune.measure.results.outcome import outcome_from_dict
from amptune.policy.serialization import policy_from_dict
from amptune.search.table.trial import Trial

__all__ = ["trials_in"]


def trials_in(study: optuna.Study, besides: Collection[int] = ()) -> list[Trial]:
    """Returns the trials of an Optuna study that have an outcome, except the numbers `besides`, as they ended."""
    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [
        Trial(
            number=one.number,
            policy=policy_from_dict(one.user_attrs["policy"]),
            outcome=outcome_from_dict(one.user_attrs["outcome"]),
            seconds=one.user_attrs["seconds"],
            run=one.user_attrs["run"],
            moment_s=one.user_attrs["moment_s"],
        )
        for one in sorted(ended, key=lambda one: (one.datetime_complete or datetime.max, one.number))
        if "outcome" in one.user_attrs and one.number not in besides
    ]
