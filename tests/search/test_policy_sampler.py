"""The study as Optuna knows it: samplers, workers beside one another, and what plain Optuna reads."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import TrialState
from simulated.recorded import RecordedEvaluator

from amptune.measure.results.outcome import Effort
from amptune.policy.settings import STOCK, Policy
from amptune.search.sampler.study import Study, open_study
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.table.trial import Trial


def candidates() -> Candidates:
    return candidates_for(RecordedEvaluator("resnet50").prepare(1.0), Wanted(baseline=STOCK, pins={}))


def opened(where: Path | str, sampler: BaseSampler | None = None) -> Study:
    known = candidates()
    return open_study(where, "study", known.space, known.policy_of, seed=0, baseline=STOCK, sampler=sampler)


def searched(study: Study, count: int) -> list[Policy]:
    """Measures so many suggestions."""
    found = []
    for _ in range(count):
        suggestion = study.suggest()
        assert suggestion is not None
        found.append(suggestion.policy)
        outcome = RecordedEvaluator("resnet50").measure(suggestion.policy, Effort())
        number = len(study.trials)
        study.tell(suggestion, Trial(number=number, policy=suggestion.policy, outcome=outcome, seconds=1.0))
    return found


def test_a_new_process_asks_what_the_old_one_would_have_asked(tmp_path: Path) -> None:
    whole = searched(opened(tmp_path / "whole"), 8)
    parts = [policy for _ in range(4) for policy in searched(opened(tmp_path / "parts"), 2)]
    assert parts == whole


def test_optunas_own_samplers_search_the_space_and_plain_optuna_reads_what_ran(tmp_path: Path) -> None:
    study = opened(tmp_path, RandomSampler(seed=0))
    found = searched(study, 8)
    assert len(set(found)) == 8
    assert all(policy in study for policy in found)
    plain = optuna.load_study(study_name="study", storage=study._store._study._storage)
    complete = plain.get_trials(states=(TrialState.COMPLETE,))
    assert [candidates().policy_of(trial.params) for trial in complete] == found  # type: ignore[arg-type]
    assert plain.best_value == pytest.approx(max(trial.samples_per_s for trial in study.trials))
