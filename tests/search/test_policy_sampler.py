"""The study as Optuna knows it: samplers, workers beside one another, and what plain Optuna reads."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState
from simulated.recorded import RecordedEvaluator, recorded_ms

from amptune.measure.results.outcome import Effort
from amptune.policy.settings import STOCK, Policy
from amptune.search.sampler.policy_sampler import sampler_named, with_fixed
from amptune.search.sampler.storage import Handle, Store
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
        if suggestion is None:
            break
        found.append(suggestion.policy)
        outcome = RecordedEvaluator("resnet50").measure(suggestion.policy, Effort())
        number = len(study.trials)
        study.tell(suggestion, Trial(number=number, policy=suggestion.policy, outcome=outcome, seconds=1.0))
    return found


def test_a_new_process_asks_what_the_old_one_would_have_asked(tmp_path: Path) -> None:
    whole = searched(opened(tmp_path / "whole"), 16)
    parts = [policy for _ in range(4) for policy in searched(opened(tmp_path / "parts"), 4)]
    assert parts == whole


def test_a_trial_that_others_gave_up_while_it_was_chosen_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, ask = opened(tmp_path / "study"), Store.ask
    asked: list[int] = []

    def asked_and_given_up(store: Store, sampler: BaseSampler) -> Handle:
        handle = ask(store, sampler)
        asked.append(handle.number)
        if len(asked) == 1:
            store.forget(handle)  # as another worker does that takes this one for gone
        return handle

    monkeypatch.setattr(Store, "ask", asked_and_given_up)
    suggestion = study.suggest()
    assert suggestion is not None
    assert [suggestion.handle.number] == asked[1:]


@pytest.mark.parametrize(
    "sampler", [RandomSampler(seed=0), TPESampler(seed=0, n_startup_trials=4)], ids=["random", "tpe"]
)
def test_optunas_own_samplers_search_the_space(tmp_path: Path, sampler: BaseSampler) -> None:
    study = opened(tmp_path, sampler)
    study.measure_first([STOCK])
    found = searched(study, 25)
    assert len(set(found)) == 25
    assert all(policy in study for policy in found)
    assert min(recorded_ms("resnet50", policy) for policy in found) < recorded_ms("resnet50", STOCK)


@pytest.mark.slow
def test_optunas_gaussian_process_searches_too(tmp_path: Path) -> None:
    assert len(set(searched(opened(tmp_path, sampler_named("gp", seed=0)), 15))) == 15


def test_a_sampler_that_always_proposes_the_same_hands_over(tmp_path: Path) -> None:
    stubborn = with_fixed(RandomSampler(), candidates().space.try_first[0])
    assert len(set(searched(opened(tmp_path, stubborn), 5))) == 5


@pytest.mark.slow
def test_plain_optuna_reads_values_and_the_parameters_that_ran(tmp_path: Path) -> None:
    study = opened(f"sqlite:///{tmp_path / 'study.db'}")
    study.measure_first([STOCK])
    found = searched(study, 12)
    plain = optuna.load_study(study_name="study", storage=f"sqlite:///{tmp_path / 'study.db'}")
    complete = plain.get_trials(states=(TrialState.COMPLETE,))
    ran = [candidates().policy_of(trial.params) for trial in complete]  # type: ignore[arg-type]
    assert ran == found
    assert plain.best_value == pytest.approx(max(trial.samples_per_s for trial in study.trials))
    assert set(optuna.importance.get_param_importances(plain)) == set(complete[0].params)
