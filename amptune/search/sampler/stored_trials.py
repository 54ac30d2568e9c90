"""The trials of an Optuna study that have ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from amptune.measure.results.outcome import outcome_from_dict
from amptune.policy.serialization import policy_from_dict
from amptune.search.table.trial import Trial

__all__ = ["trials_in"]

# The run of trials that an earlier amptune made.
_FORMER = "former"


def trials_in(study: optuna.Study, besides: Collection[int] = ()) -> list[Trial]:
    """Returns the trials of an Optuna study that have an outcome, except the numbers `besides`, as they ended."""
    return list(_remembered(study, besides))


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
