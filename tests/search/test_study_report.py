"""What a study answers without measuring again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from simulated.recorded import RecordedEvaluator
from test_objective import ENERGY, MEMORY, peak_mib, recording, speed_costs_memory, tuned_for
from test_pipeline import request_in

from amptune.errors import ObjectiveError, StudyError
from amptune.policy.settings import STOCK, amp_recipe
from amptune.search.decide.study_report import command_of, study_report_of, tuning_command
from amptune.search.pipeline import tune_with
from amptune.search.sampler import backend
from amptune.search.sampler.records import without_password
from amptune.search.sampler.storage import recall
from amptune.search.space.global_batch import GlobalBatch
from amptune.search.table.objective import THROUGHPUT, Objective


def test_every_objective_is_answered_from_one_tuning_for_throughput(tmp_path: Path) -> None:
    tuned_for(THROUGHPUT, tmp_path)
    for objective, expected in (
        (THROUGHPUT, amp_recipe("bf16")),
        (MEMORY, amp_recipe("fp16")),
        (Objective("memory", 0.85), amp_recipe("bf16", memory_format="channels_last")),
        (ENERGY, amp_recipe("fp16")),
    ):
        found = study_report_of(recall(tmp_path), objective)
        assert replace(found.winner, fused_optimizer=False) == expected  # which changes nothing on this machine
        speedup = speed_costs_memory(STOCK) / speed_costs_memory(expected)
        assert found.verdict.speedup.value == pytest.approx(speedup, rel=0.1)
        assert found.verdict.confidence == "confirmed" or objective != THROUGHPUT
        if objective.name == "memory":
            assert found.verdict.gain.value == pytest.approx(peak_mib(STOCK) / peak_mib(expected), rel=0.01)


def test_the_command_that_proves_an_answer_has_the_wishes_that_make_it_the_same_study(tmp_path: Path) -> None:
    whole = GlobalBatch(samples=512, devices=2)
    machine = recording()
    request = request_in(
        tmp_path, machine.clock, trials=4, baseline=amp_recipe("bf16"), pins={"autocast": "bf16"}, batch_size=128,
        global_batch=whole, devices=2, compile=False, memory_mib=61440.0,
    )  # fmt: skip
    tune_with(machine, replace(request, device="cuda:1"), lambda _: None)
    record = recall(tmp_path)
    assert tuning_command(record.last).endswith("--objective throughput --study NEW")
    assert tuning_command(record.last, budget_s=300).endswith("--objective throughput --budget 300s --study NEW")
    assert command_of(study_report_of(record, record.last.objective)) == (
        "amptune tune recorded --baseline amp-bf16 --batch-size 128 --global-batch 512 --devices 2 "
        "--max-memory 61440MiB --device cuda:1 --no-compile --set autocast=bf16 "
        f"--objective throughput --study {tmp_path}"
    )


# --- what a study remembers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"policy": {"autocast": "int8"}}, {"outcome": {"failed": False}}, {"moment_s": math.nan}, {"run": None}]
)
def test_a_row_that_cannot_be_read_is_told_with_its_line(wrong: dict[str, Any], tmp_path: Path) -> None:
    tuned_for(THROUGHPUT, tmp_path, trials=6)
    record = recall(tmp_path)
    study = optuna.load_study(study_name=record.name, storage=backend.opened(tmp_path))
    study.set_user_attr("row 1", {**record.rows[0].as_dict(), **wrong})
    line = len((tmp_path / "journal.log").read_text().splitlines())
    with pytest.raises(StudyError, match=f"journal.log:{line}: is no record of a study: "):
        recall(tmp_path)


def test_of_several_studies_that_which_was_tuned_last_is_taken_or_the_one_named(tmp_path: Path) -> None:
    for workload, trials in (("vgg16_cifar", 2), ("resnet50", 2), ("vgg16_cifar", 1)):
        machine = RecordedEvaluator(workload)
        tune_with(machine, request_in(tmp_path, machine.clock, trials=trials), lambda _: None)
        assert recall(tmp_path).last.workload == workload
    last = recall(tmp_path)
    assert len(last.trials) == 3
    assert recall(tmp_path, run=last.tunings[0].run).name == last.name
    assert recall(tmp_path, last.name).name == last.name
    with pytest.raises(StudyError, match=r"holds no study 'mine', but resnet50-\w+, vgg16_cifar-\w+"):
        recall(tmp_path, "mine")


def test_a_study_without_what_is_asked_says_so(tmp_path: Path) -> None:
    tuned_for(THROUGHPUT, tmp_path, recording(energy=False), trials=4)
    record = recall(tmp_path)
    with pytest.raises(ObjectiveError, match=r"knows of no energy: NVIDIA H200 reported none"):
        study_report_of(record, ENERGY)
    without = replace(record, trials=tuple(trial for trial in record.trials if trial.policy != STOCK), rows=())
    with pytest.raises(StudyError, match=r"the baseline of the study resnet50-\w+ \(stock PyTorch\) was not measured"):
        study_report_of(without, THROUGHPUT)


# --- passwords --------------------------------------------------------------------------------------------------------


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
