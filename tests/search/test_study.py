"""What the study knows of policies: their neighbours, and measurements that surprise it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from optuna.samplers import TPESampler
from optuna.storages import InMemoryStorage
from simulated.recorded import RecordedEvaluator
from test_pipeline import OOM

from amptune.errors import StudyError
from amptune.measure.results.outcome import Effort, Failure, Outcome, outcome_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.sampler.storage import open_store
from amptune.search.sampler.study import Study, open_study
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import Dimension, Space, with_choices
from amptune.search.table.trial import Trial

WINNER = amp_recipe("fp16", memory_format="channels_last")


@pytest.fixture
def candidates() -> Candidates:
    return candidates_for(RecordedEvaluator("resnet50").prepare(1.0), Wanted(baseline=STOCK, pins={}))


@pytest.fixture
def study(candidates: Candidates) -> Study:
    storage = InMemoryStorage()
    return open_study(storage, "study", candidates.space, candidates.policy_of, seed=0)  # type: ignore[arg-type]


def tell(study: Study, policy: Policy, outcome: Outcome | None = None) -> None:
    study.measure_first([policy])
    suggestion = study.suggest()
    assert suggestion is not None
    assert suggestion.policy == policy
    outcome = outcome or RecordedEvaluator("resnet50").measure(policy, Effort())
    study.tell(suggestion, Trial(number=len(study.trials), policy=policy, outcome=outcome, seconds=1.0))


def test_what_failed_or_was_far_slower_is_no_neighbour_and_what_an_outlier_explains_is(study: Study) -> None:
    tell(study, WINNER)
    tell(study, amp_recipe("bf16", memory_format="channels_last"))  # slower by a quarter
    tell(study, amp_recipe("fp16"))  # and by nearly half
    tell(study, replace(WINNER, cudnn_benchmark=True), OOM)
    near = study.neighbours(WINNER)
    assert amp_recipe("bf16", memory_format="channels_last") in near
    assert amp_recipe("fp16") not in near
    assert replace(WINNER, cudnn_benchmark=True) not in near


def test_a_storage_that_never_gives_what_it_was_asked_for_ends_the_search(study: Study, candidates: Candidates) -> None:
    study.adopt(with_choices(candidates.space, "batch_size", (32, 64), 32), candidates.policy_of)
    with pytest.raises(StudyError, match="none of the policies"):
        study.suggest()


def test_a_study_that_another_version_wrote_is_a_clear_error() -> None:
    knob = Dimension(name="autocast", choices=("off", "bf16"))
    store = open_store(InMemoryStorage(), "study", Space(architecture="", compute_capability=(), knobs=(knob,)))  # type: ignore[arg-type]
    handle = store.ask(TPESampler(seed=0))
    store.settle(handle)
    store.claim(handle, STOCK)
    handle.set_user_attr("outcome", outcome_to_dict(Failure(kind="oom", message="out of memory")))
    handle.set_user_attr("seconds", 1.0)
    store._study.tell(handle, 0.0)
    with pytest.raises(StudyError, match=r"another version of amptune wrote it: .*run.*; choose another with --study"):
        store.trials()
