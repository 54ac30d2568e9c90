"""Optuna's samplers drive a search, and leave nothing in its study but what ran."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.samplers import BaseSampler, GPSampler, QMCSampler, RandomSampler, TPESampler
from studies import OOM
from test_study import BF16, candidates, opened, plain, trial_of

from amptune.policy.settings import STOCK, Policy
from amptune.search.sampler.backend import experimental
from amptune.search.sampler.policy_sampler import sampler_named
from amptune.search.sampler.study import Study


def searched(study: Study, count: int, besides: tuple[Policy, ...] = ()) -> list[Policy]:
    """Measures what the study's sampler proposes; the first fails."""
    found: list[Policy] = []
    for number in range(count):
        policy = study.suggested(besides)
        assert policy is not None
        assert study.claim(policy)
        study.tell(trial_of(policy, study, None if number else OOM))
        found.append(policy)
    return found


def samplers() -> list[BaseSampler]:
    with experimental():
        return [RandomSampler(seed=0), TPESampler(seed=0), GPSampler(seed=0, n_startup_trials=3), QMCSampler(seed=0)]


@pytest.mark.parametrize("sampler", samplers(), ids=lambda one: type(one).__name__)
def test_any_of_optunas_samplers_searches_the_space(sampler: BaseSampler, tmp_path: Path) -> None:
    study = opened(tmp_path, sampler=sampler)
    found = searched(study, 8)
    assert len(set(found)) == 8
    assert set(found) <= study.history.catalog.points.keys()
    stored = plain(tmp_path)
    assert [candidates().policy_of(trial.params) for trial in stored.trials] == found  # type: ignore[arg-type]
    assert stored.best_value == max(trial.samples_per_s for trial in study.trials)


def test_what_others_have_is_not_proposed(tmp_path: Path) -> None:
    known = candidates(compile="off", fused_optimizer="false", cuda_graphs="false", fp32_exclusions="0")
    study = opened(tmp_path, "1", known, sampler=RandomSampler(seed=0))
    assert opened(tmp_path, "2", known).claim(BF16)
    assert all(study.suggested((STOCK,)) not in (STOCK, BF16, None) for _ in range(20))
    assert study.suggested(study.history.catalog.policies) is None, "none is free"
    assert plain(tmp_path).trials == []


def test_without_a_sampler_nothing_is_suggested(tmp_path: Path) -> None:
    assert sampler_named("amptune", 0) is None
    assert isinstance(sampler_named("tpe", 0), TPESampler)
    assert opened(tmp_path).suggested(()) is None


def test_a_sampler_goes_on_in_the_space_that_is_adopted(tmp_path: Path) -> None:
    study = opened(tmp_path, sampler=TPESampler(seed=0, n_startup_trials=1))
    searched(study, 3)
    other = candidates(autocast="bf16")
    study.adopt(other.space, other.policy_of)
    for policy in searched(study, 3):
        assert policy.autocast == "bf16"
    assert optuna.trial.TrialState.FAIL not in {trial.state for trial in plain(tmp_path).trials}
