"""The space's knobs as distributions of Optuna."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from amptune.search.space.knobs import BATCH_SIZE, Dimension, Space

__all__ = ["distributions_of", "suggest"]

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
