"""amptune's own sampler, as Optuna knows samplers: a study's history is all its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from amptune.search.sampler.acquisition import Proposal, Proposer
from amptune.search.sampler.backend import experimental
from amptune.search.sampler.catalog import Catalog, History
from amptune.search.sampler.stored_trials import running_in, trials_in
from amptune.search.space.knobs import Value
from amptune.search.table.trial import Trial

__all__ = ["PolicySampler", "Sampler", "sampler_named", "with_fixed"]

# What `amptune.tune` takes: any of Optuna's samplers.
Sampler = BaseSampler


def sampler_named(name: str, seed: int) -> BaseSampler | None:
    """Returns one of Optuna's samplers by its name; None for "amptune", which needs the study's space."""
    makers: Mapping[str, Callable[..., BaseSampler]] = {"tpe": TPESampler, "gp": GPSampler, "random": RandomSampler}
    with experimental():
        return makers[name](seed=seed) if name in makers else None


def with_fixed(sampler: BaseSampler, fixed: Mapping[str, Value]) -> BaseSampler:
    """Returns a sampler that proposes as this one, with some knobs fixed."""
    if not fixed:
        return sampler
    with experimental():
        return PartialFixedSampler(dict(fixed), sampler)


class PolicySampler(BaseSampler):
    """Proposes the policy of a space that promises most for its time.

    It learns from the finished trials of the Optuna study, and believes that running ones turn out as expected. So any
    process that has the study gets the next policy from it. Policies that are `left_out`, by index, are not proposed,
    and none is while it `is_idle`. `proposal` is what it answered, as Optuna hands on settings alone: None if no policy
    was left or none was asked for, since it was idle or the trial `was_enqueued`.
    """

    def __init__(
        self,
        distributions: Mapping[str, BaseDistribution],
        catalog: Catalog,
        history_of: Callable[[Collection[Trial]], History],
        proposer: Proposer,
        left_out: Collection[int] = (),
        *,
        is_idle: bool = False,
    ) -> None:
        self._distributions, self._catalog, self._history_of = distributions, catalog, history_of
        self._proposer, self._left_out, self._is_idle = proposer, left_out, is_idle
        self.proposal: Proposal | None = None
        self.was_enqueued = False

    def infer_relative_search_space(
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
    ) -> dict[str, BaseDistribution]:
        return dict(self._distributions)

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        """Returns the setting of every knob; {} for a trial that needs none."""
        self.proposal, self.was_enqueued = None, "fixed_params" in trial.system_attrs
        if self._is_idle or self.was_enqueued:
            return {}
        history = self._history_of(trials_in(study))
        running = {self._catalog.index[one] for one in running_in(study).values() if one in self._catalog.index}
        left_out = {*self._left_out, *history.too_large()}
        self.proposal = self._proposer.next(history.seen(), left_out, running)
        index = 0 if self.proposal is None else self.proposal.index
        return dict(self._catalog.points[self._catalog.policies[index]])

    def sample_independent(
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
        param_name: str,
        param_distribution: BaseDistribution,  # noqa: ARG002
    ) -> Any:
        """Returns the first policy's setting: only a trial with some settings enqueued lacks others."""
        return self._catalog.points[self._catalog.policies[0]][param_name]
