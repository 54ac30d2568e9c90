"""Optuna's form of a space's knobs and of a finished trial."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, create_trial

from amptune.measure.results.outcome import outcome_from_dict
from amptune.policy.serialization import finite, policy_from_dict, text
from amptune.search.space.knobs import BATCH_SIZE, Dimension, Point, Space
from amptune.search.table.trial import Trial

__all__ = ["Distributions", "complete", "distributions_of", "finished", "trial_from"]

Distributions = Mapping[str, BaseDistribution]

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


def finished(trial: Trial, point: Point | None, distributions: Distributions) -> FrozenTrial:
    """Returns a trial as Optuna keeps it: complete, with the parameters of its point if that is one of the space."""
    row = trial.row.as_dict()
    attributes = {**{name: row[name] for name in ("policy", "outcome", "run", "moment_s")}, "seconds": trial.seconds}
    params = dict(point) if point is not None and _holds(distributions, point) else {}
    frozen = complete(params, distributions, trial.samples_per_s, attributes)
    if frozen.datetime_complete is not None:
        frozen.datetime_start = frozen.datetime_complete - timedelta(seconds=trial.seconds)
    return frozen


def complete(
    params: Mapping[str, Any], distributions: Distributions, samples_per_s: float, attributes: Mapping[str, Any]
) -> FrozenTrial:
    """Returns a complete trial; if it was worth nothing, it violates a constraint.

    Samplers see neither a trial that Optuna calls failed, nor one with another number of constraints than the others.
    """
    return create_trial(
        value=samples_per_s,
        params=dict(params),
        distributions={name: distributions[name] for name in params},
        user_attrs=dict(attributes),
        system_attrs={"constraints": [0.0 if samples_per_s else 1.0]},  # Optuna 4's form, which 5 reads too
    )


def _holds(distributions: Distributions, point: Point) -> bool:
    """Returns True if a point has a value of each distribution, and no others."""
    try:
        held = (one._contains(one.to_internal_repr(point[name])) for name, one in distributions.items())
        return point.keys() == distributions.keys() and all(held)
    except ValueError:  # Optuna's, of a category that is none of the choices
        return False


def trial_from(attributes: Mapping[str, Any], number: int = 0) -> Trial:
    """Reads the attributes of a trial that `finished` made; raises an error for anything else."""
    return Trial(
        number=number,
        policy=policy_from_dict(attributes["policy"]),
        outcome=outcome_from_dict(attributes["outcome"]),
        seconds=finite(attributes["seconds"]),
        run=text(attributes["run"]),
        moment_s=finite(attributes["moment_s"]),
    )
