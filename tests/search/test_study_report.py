"""What a study answers without measuring again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from simulated.recorded import RecordedEvaluator
from test_objective import BF16, ENERGY, FP16, MEMORY, peak_mib, recording, speed_costs_memory
from test_pipeline import request_in

from amptune.errors import NothingFeasibleError, ObjectiveError, StudyError
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.decide.study_report import StudyReport, command_of, study_report_of
from amptune.search.events import Event
from amptune.search.pipeline import tune_with
from amptune.search.sampler import backend
from amptune.search.sampler.records import without_password
from amptune.search.sampler.storage import recall
from amptune.search.space.global_batch import GlobalBatch
from amptune.search.table.objective import THROUGHPUT, Objective

SMALLEST = amp_recipe("bf16", memory_format="channels_last")


def tuned(
    folder: Path,
    evaluator: RecordedEvaluator | None = None,
    objective: Objective = THROUGHPUT,
    *,
    trials: int = 30,
    baseline: Policy = STOCK,
    events: list[Event] | None = None,
    **changes: Any,
) -> Decision:
    evaluator = evaluator or recording()
    pins = {"cuda_graphs": "false"}  # which were not recorded
    request = request_in(folder, evaluator.clock, trials=trials, baseline=baseline, pins=pins)
    observer = (lambda _: None) if events is None else events.append
    return tune_with(evaluator, replace(request, objective=objective, **changes), observer)


def asked(folder: Path, objective: Objective = THROUGHPUT) -> StudyReport:
    return study_report_of(recall(folder), objective)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (THROUGHPUT, BF16),
        (MEMORY, FP16),
        (Objective("memory", 0.85), SMALLEST),
        (ENERGY, FP16),
    ],
)
def test_every_objective_is_answered_from_one_tuning_for_throughput(
    objective: Objective, expected: Policy, tmp_path: Path
) -> None:
    decision = tuned(tmp_path)
    study_report = asked(tmp_path, objective)
    assert study_report.policy == expected
    assert study_report.verdict.speedup.value == pytest.approx(
        speed_costs_memory(STOCK) / speed_costs_memory(expected), rel=0.02
    )
    if objective == THROUGHPUT:
        assert study_report.is_proven
        assert study_report.verdict.gain.value == pytest.approx(decision.gain.value, rel=0.01)
    if objective.name == "memory":
        assert study_report.verdict.gain.value == pytest.approx(peak_mib(STOCK) / peak_mib(expected), rel=0.01)


def test_the_command_that_proves_an_answer_has_the_wishes_that_make_it_the_same_study(tmp_path: Path) -> None:
    wishes = {"pins": {"autocast": "bf16"}, "batch_size": 128, "global_batch": GlobalBatch(samples=512, devices=2)}
    wishes["devices"] = 2
    machine = recording()
    request = request_in(tmp_path, machine.clock, trials=4, baseline=BF16, **wishes, compile=False, memory_mib=61440.0)
    tune_with(machine, replace(request, device="cuda:1"), lambda _: None)
    words = command_of(asked(tmp_path, THROUGHPUT))
    assert words == (
        "amptune tune recorded --baseline amp-bf16 --batch-size 128 --global-batch 512 --devices 2 "
        "--max-memory 61440MiB --device cuda:1 --no-compile --set autocast=bf16 "
        f"--objective throughput --study {tmp_path}"
    )


# --- one verdict ------------------------------------------------------------------------------------------------------


def test_a_tuning_whose_baseline_failed_does_not_hide_the_one_before(tmp_path: Path) -> None:
    decision = tuned(tmp_path)
    evaluator = recording()
    evaluator.interfere = lambda _: Failure(kind="oom", message="above the 100 MiB allowed")
    with pytest.raises(NothingFeasibleError):
        tune_with(evaluator, request_in(tmp_path, evaluator.clock, memory_mib=100.0), lambda _: None)
    assert asked(tmp_path).policy == decision.winner


# --- what a study remembers -------------------------------------------------------------------------------------------


def test_a_row_of_another_amptune_costs_that_row(tmp_path: Path) -> None:
    tuned(tmp_path, trials=6)
    whole, name = recall(tmp_path).rows, recall(tmp_path).name
    study = optuna.load_study(study_name=name, storage=backend.opened(tmp_path))
    other = whole[0].as_dict()
    study.set_user_attr("row 1", {**other, "policy": {"autocast": "int8"}})
    study.set_user_attr("row 2", {**other, "outcome": {"failed": False}})
    study.set_user_attr("row 3", {"policy": other["policy"]})
    assert recall(tmp_path).rows == whole


def test_of_several_studies_that_of_the_latest_trial_is_taken_or_the_one_named(tmp_path: Path) -> None:
    tuned(tmp_path, RecordedEvaluator("vgg16_cifar"), trials=4)
    tuned(tmp_path, RecordedEvaluator("resnet50"), trials=4)
    assert recall(tmp_path).last.workload == "resnet50"
    tuned(tmp_path, RecordedEvaluator("vgg16_cifar"), trials=1)
    last = recall(tmp_path)
    assert (last.last.workload, len(last.trials)) == ("vgg16_cifar", 5)
    assert recall(tmp_path, run=last.tunings[0].run).name == last.name
    assert recall(tmp_path, last.name).name == last.name
    with pytest.raises(StudyError, match=r"holds no study 'mine', but resnet50-\w+, vgg16_cifar-\w+"):
        recall(tmp_path, "mine")


def test_a_study_without_what_is_asked_says_so(tmp_path: Path) -> None:
    tuned(tmp_path, recording(energy=False), trials=4)
    with pytest.raises(ObjectiveError, match=r"knows of no energy: NVIDIA H200 reported none"):
        asked(tmp_path, ENERGY)
    record = recall(tmp_path)
    without = replace(record, trials=tuple(trial for trial in record.trials if trial.policy != STOCK), rows=())
    with pytest.raises(StudyError, match=r"the baseline of the study resnet50-\w+ \(stock PyTorch\) was not measured"):
        study_report_of(without, THROUGHPUT)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("runs/small", "runs/small"),
        ("mysql://u@x:a/secret@h/d", None),
        ("postgresql://u:sec@ret@h/d", None),
        ("postgresql://h/d?user=u&password=secret&x=1", None),
    ],
)
def test_a_place_is_shown_without_its_password(url: str, shown: str | None) -> None:
    assert shown in (None, without_password(url))
    assert "ret" not in without_password(url)


@pytest.mark.parametrize("url", ["redis://h:1/0", "postgresql://me:secret@h:99999x/d", "nonsense://h/d"])
def test_a_database_that_optuna_cannot_open_is_said_to_be_none(url: str) -> None:
    with pytest.raises(StudyError, match=r"no database that Optuna can open|cannot be read or written") as caught:
        recall(url)
    assert "secret" not in str(caught.value)


def test_a_message_about_a_database_does_not_tell_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optuna.storages, "get_storage", lambda _: optuna.storages.InMemoryStorage())
    for name, message in ((None, "there are no trials in"), ("other", "holds no study 'other'")):
        with pytest.raises(StudyError, match=message) as caught:
            recall("postgresql://me:secret@host:5432/db", name)
        assert "postgresql://me:***@host:5432/db" in str(caught.value)
