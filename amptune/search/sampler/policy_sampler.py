"""Optuna's samplers: asked on a study in memory, since the stored one keeps only what ran."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from amptune.policy.settings import Policy
from amptune.search.sampler.backend import experimental
from amptune.search.sampler.catalog import History
from amptune.search.sampler.optuna_trials import complete, distributions_of, finished
from amptune.search.space.knobs import Space
from amptune.search.table.trial import Trial

__all__ = ["PolicySampler", "Sampler", "sampler_named"]

# What `amptune.tune` takes: any of Optuna's samplers.
Sampler = BaseSampler
# A sampler may propose this many policies in turn that were measured or are none.
MOST_ASKED = 20


def sampler_named(name: str, seed: int) -> BaseSampler | None:
    """Returns one of Optuna's samplers by its name; None for "amptune", which is none of them."""
    makers: Mapping[str, Callable[..., BaseSampler]] = {"tpe": TPESampler, "gp": GPSampler, "random": RandomSampler}
    with experimental():
        return makers[name](seed=seed) if name in makers else None


class PolicySampler:
    """A sampler of Optuna's that proposes policies of one space. It sees copies of the trials."""

    def __init__(self, sampler: BaseSampler, space: Space) -> None:
        self._distributions = distributions_of(space)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._copied: set[Trial] = set()

    def next(self, history: History, besides: Collection[Policy]) -> Policy | None:
        """Returns a policy neither measured, nor too large, nor `besides`; None if the sampler names no such policy."""
        catalog = history.catalog
        for trial in [one for one in history.trials if one not in self._copied]:
            self._study.add_trial(finished(trial, catalog.points.get(trial.policy), self._distributions))
            self._copied.add(trial)
        with experimental():
            for _ in range(MOST_ASKED):
                asked = self._study.ask(self._distributions)
                policy = catalog.policy_of(asked.params)
                known = history.latest.get(policy) if policy is not None else None
                self._study.tell(asked, state=TrialState.FAIL)
                if policy is None or known is not None:  # a sampler that is told that need not ask for it again
                    worth = 0.0 if known is None else known.samples_per_s
                    self._study.add_trial(complete(asked.params, self._distributions, worth, {}))
                elif policy not in besides and catalog.index[policy] not in history.too_large:
                    return policy
        return None
