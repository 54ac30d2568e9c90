"""What a study answers without measuring again."""

from __future__ import annotations

import re
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
from amptune.measure.results.training_runs import Parity
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.decide.study_report import StudyReport, command_of, findings_of, study_report_of
from amptune.search.events import ContenderMeasured, Event, TrialEnded
from amptune.search.pipeline import TuningInterrupted, tune_with
from amptune.search.sampler import backend
from amptune.search.sampler.records import StudyRecord, without_password
from amptune.search.sampler.storage import recall
from amptune.search.space.global_batch import GlobalBatch
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.verdict import Verdict

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


def by_trials(folder: Path, objective: Objective = THROUGHPUT) -> StudyReport:
    """The answer of the trials alone, as if nothing had been compared."""
    return study_report_of(replace(recall(folder), rows=()), objective)


def told(verdict: Verdict) -> dict[str, Any]:
    """What a verdict says, its figures to six digits: a stored moment is rounded to a millisecond."""
    figures = {
        contender.policy: (contender.lost, contender.rows, float(f"{contender.speedup:.5g}"))
        for contender in verdict.contenders
    }
    ratios = [float(f"{x:.5g}") for one in (verdict.gain, verdict.speedup) for x in (one.value, one.low, one.high)]
    return {
        "winner": verdict.winner.policy,
        "baseline": verdict.baseline.policy,
        "confidence": verdict.confidence,
        "findings": verdict.findings,
        "contenders": figures,
        "ratios": ratios,
    }


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


def test_an_answer_that_is_only_likely_says_so_and_how_to_confirm_it(tmp_path: Path) -> None:
    tuned(tmp_path, small_gain(8.0, noise=0.02), trials=12)
    study_report = by_trials(tmp_path)
    assert (study_report.policy.autocast, study_report.verdict.confidence) == ("bf16", "likely")
    assert re.match(r"likely, 9\d\.\d % sure, by 1 measurement in 1 process$", study_report.grounds)
    command = f"amptune tune recorded --set cuda_graphs=false --objective throughput --study {tmp_path}"
    assert command_of(study_report) == command
    assert [finding.code for finding in findings_of(study_report)][:2] == ["answer", "not-proven"]
    assert command in str(findings_of(study_report)[1])
    assert not study_report.is_proven


def small_gain(percent: float, noise: float) -> RecordedEvaluator:
    """A machine on which bf16 is a little faster than all else."""
    return RecordedEvaluator(
        "resnet50", noise=noise, true_ms=lambda policy: 20.0 / (1 + percent / 100 * (policy.autocast == "bf16"))
    )


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


def test_a_tuning_for_the_objective_proves_it_in_the_same_study(tmp_path: Path) -> None:
    tuned(tmp_path)
    tuned(tmp_path, objective=MEMORY, trials=3)
    study_report = asked(tmp_path, MEMORY)
    assert (study_report.policy, study_report.verdict.confidence) == (FP16, "confirmed")
    assert re.match(r"confirmed, over 99\.9 % sure, by \d+ measurements in \d+ processes$", study_report.grounds)
    assert [one.variant.setting for one in study_report.ablation] == ["autocast"]
    assert study_report.ablation[0].buys.value == pytest.approx(2.0, rel=0.01)


def test_where_nothing_is_better_the_baseline_is_kept(tmp_path: Path) -> None:
    tuned(tmp_path, RecordedEvaluator("resnet50", noise=0.002, true_ms=lambda _: 20.0), trials=8)
    for objective in (THROUGHPUT, MEMORY):
        study_report = asked(tmp_path, objective)
        assert study_report.keeps_the_baseline
        assert study_report.sentence.startswith("keep what you have: no policy was seen to ")


def test_a_policy_that_the_numerics_gate_rejected_is_no_answer(tmp_path: Path) -> None:
    broken = Parity(failure=Failure(kind="nonfinite", message="the loss is nan"))
    evaluator = recording()
    evaluator.parity = lambda policy: broken if policy.autocast == "bf16" else Parity()
    tuned(tmp_path, evaluator)
    study_report = asked(tmp_path, THROUGHPUT)
    assert study_report.policy.autocast == "fp16"
    assert not any(point.policy.autocast == "bf16" for point in study_report.front)
    assert any("bf16" in str(one) for one in findings_of(study_report) if one.code == "rejected")


def test_what_the_wishes_do_not_allow_is_no_answer(tmp_path: Path) -> None:
    machine = recording()
    tune_with(machine, request_in(tmp_path, machine.clock, trials=20, pins={"autocast": "fp16"}), lambda _: None)
    for study_report in (asked(tmp_path), by_trials(tmp_path)):
        assert study_report.policy.autocast == "fp16"
        recipe = study_report.verdict.contender_of(BF16)
        assert recipe is not None
        assert recipe.lost == "outside the space: it was measured for comparison"


# --- one verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [THROUGHPUT, MEMORY, ENERGY], ids=lambda one: one.name)
def test_a_tuning_its_file_and_its_study_say_the_same(objective: Objective, tmp_path: Path) -> None:
    decision = tuned(tmp_path, objective=objective)
    study_report = asked(tmp_path, objective)
    assert told(study_report.verdict) == told(decision.verdict)
    assert study_report.points == decision.points
    assert_written(decision)


@pytest.mark.parametrize("percent", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("noise", [0.005, 0.03])
def test_they_say_the_same_of_a_gain_that_is_hardly_shown(percent: float, noise: float, tmp_path: Path) -> None:
    decision = tuned(tmp_path, small_gain(percent, noise), trials=12)
    assert told(asked(tmp_path).verdict) == told(decision.verdict)
    assert_written(decision)


def assert_written(decision: Decision) -> None:
    """The evidence says what the verdict does."""
    verdict, evidence = decision.verdict, decision.policy_file.evidence
    assert evidence["confidence"] == verdict.confidence
    likely = verdict.confidence == "likely" and not verdict.keeps_the_baseline
    assert decision.provisional is likely
    assert evidence.get("provisional", False) is likely
    assert evidence["speedup"] == pytest.approx(verdict.speedup.value, rel=1e-3)
    assert evidence.get("gain", verdict.gain.value) == pytest.approx(verdict.gain.value, rel=1e-3)
    for contender, figures in zip(decision.finalists, evidence["finalists"], strict=True):
        assert figures.get("lost", "") == contender.lost or contender.failure is not None
    assert [finding["code"] for finding in evidence["findings"]] == [finding.code for finding in decision.findings]


def test_a_policy_that_the_gate_rejected_lost_by_that_in_the_tuning_and_in_its_study(tmp_path: Path) -> None:
    broken = Parity(failure=Failure(kind="nonfinite", message="the loss is nan"))
    evaluator = recording()
    evaluator.parity = lambda policy: broken if policy.autocast == "bf16" else Parity()
    decision = tuned(tmp_path, evaluator)
    assert told(asked(tmp_path).verdict) == told(decision.verdict)
    assert {one.lost for one in decision.verdict.contenders if one.policy.autocast == "bf16"} == {"not as good as FP32"}


def test_a_tuning_for_energy_knows_the_speed_of_trials_that_had_none(tmp_path: Path) -> None:
    tuned(tmp_path, recording(energy=False), trials=10)
    decision = tuned(tmp_path, objective=ENERGY, trials=10)
    assert told(asked(tmp_path, ENERGY).verdict) == told(decision.verdict)


def test_what_an_earlier_tuning_measured_counts_in_a_later_one(tmp_path: Path) -> None:
    first = tuned(tmp_path)
    again = tuned(tmp_path, trials=1)
    assert again.winner == first.winner
    assert again.verdict.winner.rows >= first.verdict.winner.rows
    assert again.baseline.rows > first.baseline.rows
    assert told(asked(tmp_path).verdict) == told(again.verdict)


@pytest.mark.parametrize("when", [8, 30, 34])
def test_an_interrupted_tuning_keeps_its_rows_and_its_study_says_what_it_says(when: int, tmp_path: Path) -> None:
    """In the search, in the first round and in a later one."""
    evaluator = recording()

    def interrupt(_: Policy) -> None:
        if len(evaluator.measured) == when:
            raise KeyboardInterrupt

    evaluator.interfere = interrupt
    with pytest.raises(TuningInterrupted) as caught:
        tuned(tmp_path, evaluator)
    decision = caught.value.decision
    assert decision is not None
    assert (decision.provisional, decision.policy_file.evidence["provisional"]) == (True, True)
    assert len(recall(tmp_path).table) == when - 1
    assert told(asked(tmp_path).verdict) == told(decision.verdict)
    assert asked(tmp_path).policy.autocast != "off"


def test_a_tuning_that_goes_on_measures_its_baseline_again_and_compares_nothing_with_an_old_run(tmp_path: Path) -> None:
    """All is twice as slow in the second run: its trials are no slower than those of the first, beside their own."""
    first = recording()
    tuned(tmp_path, first, trials=6)
    second = replace(recording(), true_ms=lambda policy: 2 * speed_costs_memory(policy))
    events: list[Event] = []
    decision = tuned(tmp_path, second, trials=6, events=events)
    new = [event.trial.policy for event in events if isinstance(event, TrialEnded)]
    assert second.measured[0] == STOCK
    assert STOCK not in new
    (anchor,) = (row for row in recall(tmp_path).rows if row.policy == STOCK and row.launch.startswith("search"))
    assert anchor.run == recall(tmp_path).last.run
    for policy in new:
        contender = decision.verdict.contender_of(policy)
        assert contender is not None
        true = speed_costs_memory(STOCK) / speed_costs_memory(policy)
        assert contender.speedup == pytest.approx(true, rel=0.03), policy


def test_a_tuning_that_goes_on_at_once_measures_the_baseline_no_third_time(tmp_path: Path) -> None:
    """Not before its own search: the first trial of a new study is in this run."""
    evaluator = recording()
    tuned(tmp_path, evaluator, trials=3)
    assert evaluator.measured[:2].count(STOCK) == 1


@pytest.mark.slow
def test_two_workers_of_one_database_know_each_others_rows(tmp_path: Path) -> None:
    """On a machine of each one's own, and in a folder of its own; the second works while the first compares."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    machine = recording()
    others: list[Decision] = []

    def begin_the_other(_: Policy) -> None:
        if machine.launched and not others:
            others.append(tuned(tmp_path / "two", trials=4, study=url))

    machine.interfere = begin_the_other
    first = tuned(tmp_path / "one", machine, trials=8, study=url)
    record, (second,) = recall(url), others
    rows = {tuning.run: [row for row in record.table if row.run == tuning.run] for tuning in record.tunings}
    own, other = rows.values()
    assert len(own) > 10
    assert len(other) > 10
    assert told(study_report_of(record, THROUGHPUT).verdict) == told(first.verdict)
    known = {contender.policy for contender in second.verdict.contenders}
    assert {row.policy for row in own if row.launch.startswith("search")} <= known
    assert first.baseline.rows == sum(row.policy == STOCK for row in record.table)


def test_a_tuning_whose_baseline_failed_does_not_hide_the_one_before(tmp_path: Path) -> None:
    decision = tuned(tmp_path)
    evaluator = recording()
    evaluator.interfere = lambda _: Failure(kind="oom", message="above the 100 MiB allowed")
    with pytest.raises(NothingFeasibleError):
        tune_with(evaluator, request_in(tmp_path, evaluator.clock, memory_mib=100.0), lambda _: None)
    assert asked(tmp_path).policy == decision.winner


# --- what a study remembers -------------------------------------------------------------------------------------------


def test_a_study_says_what_was_tuned_where_against_what(tmp_path: Path) -> None:
    tuned(tmp_path, trials=6)
    tuned(tmp_path, objective=Objective("memory", 0.9), trials=3, baseline=BF16)
    record = recall(tmp_path)
    assert [tuning.baseline for tuning in record.tunings] == [STOCK, BF16]
    last = record.last
    assert (last.workload, last.target, last.hardware, last.batch_size) == ("resnet50", "recorded", "NVIDIA H200", 128)
    assert last.objective == Objective("memory", 0.9)
    assert len(record.trials) == 9
    assert {judged.policy.autocast for judged in record.judged} == {"bf16", "fp16"}


def test_rows_of_different_runs_and_launches_are_told_apart(tmp_path: Path) -> None:
    tuned(tmp_path, trials=8)
    first = recall(tmp_path)
    tuned(tmp_path, trials=1)
    record = recall(tmp_path)
    assert [row for row in record.rows if row.run == first.last.run] == list(first.rows)
    assert {row.run for row in record.rows} == {tuning.run for tuning in record.tunings}
    launches = [row.launch for row in first.rows]
    assert launches == sorted(launches, key=lambda name: int(name.removeprefix("comparison ")))
    assert len(set(launches)) > 1


def test_rows_are_kept_as_they_were_measured(tmp_path: Path) -> None:
    events: list[Event] = []
    tuned(tmp_path, trials=8, events=events)
    blocks = [event for event in events if isinstance(event, ContenderMeasured)]
    rows = recall(tmp_path).rows
    assert [(row.launch, row.policy, row.outcome) for row in rows] == [
        (f"{block.stage} {block.launch}", block.policy, block.outcome) for block in blocks
    ]
    moments = [row.moment_s for row in rows]
    assert moments == sorted(moments)
    trials = [event.trial for event in events if isinstance(event, TrialEnded)]
    assert recall(tmp_path).table[: len(trials)] == tuple(trial.row for trial in trials)


def test_a_row_of_another_amptune_costs_that_row(tmp_path: Path) -> None:
    tuned(tmp_path, trials=6)
    whole, name = recall(tmp_path).rows, recall(tmp_path).name
    study = optuna.load_study(study_name=name, storage=backend.opened(tmp_path))
    other = whole[0].as_dict()
    study.set_user_attr("row 1", {**other, "policy": {"autocast": "int8"}})
    study.set_user_attr("row 2", {**other, "outcome": {"failed": False}})
    study.set_user_attr("row 3", {"policy": other["policy"]})
    assert recall(tmp_path).rows == whole


def test_of_several_studies_that_which_was_tuned_last_is_taken_though_it_had_no_new_trial(tmp_path: Path) -> None:
    tuned(tmp_path, RecordedEvaluator("resnet50"), trials=1)
    tuned(tmp_path, RecordedEvaluator("vgg16_cifar"), trials=4)
    machine = RecordedEvaluator("resnet50")
    request = request_in(tmp_path, machine.clock)
    tune_with(machine, replace(request, budget=replace(request.budget, seconds=0.1)), lambda _: None)
    assert recall(tmp_path).last.run == request.run


def test_a_database_without_its_driver_is_a_clear_error() -> None:
    with pytest.raises(StudyError, match=r"the study cannot be read or written: .*'oracledb'") as raised:
        recall("oracle+oracledb://nowhere/amptune")
    assert "\n" not in str(raised.value)


def test_of_several_studies_that_of_the_latest_trial_is_taken_or_the_one_named(tmp_path: Path) -> None:
    tuned(tmp_path, RecordedEvaluator("vgg16_cifar"), trials=4)
    tuned(tmp_path, RecordedEvaluator("resnet50"), trials=4)
    assert recall(tmp_path).last.workload == "resnet50"
    tuned(tmp_path, RecordedEvaluator("vgg16_cifar"), trials=1)
    last = recall(tmp_path)
    assert (last.last.workload, len(last.trials)) == ("vgg16_cifar", 5)
    assert recall(tmp_path, run=last.tunings[0].run).name == last.name
    names = {recall(tmp_path, name).name for name in (last.name,)}
    assert names == {last.name}
    with pytest.raises(StudyError, match=r"holds no study 'mine', but resnet50-\w+, vgg16_cifar-\w+"):
        recall(tmp_path, "mine")


def record_of(folder: Path, **changes: object) -> StudyRecord:
    tuned(folder, trials=4)
    return replace(recall(folder), **changes)  # type: ignore[arg-type]


def test_a_study_without_what_is_asked_says_so(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    without = replace(record, trials=tuple(trial for trial in record.trials if trial.policy != STOCK), rows=())
    with pytest.raises(StudyError, match=r"the baseline of the study resnet50-\w+ \(stock PyTorch\) was not measured"):
        study_report_of(without, THROUGHPUT)
    tuned(tmp_path / "cold", recording(energy=False), trials=4)
    with pytest.raises(ObjectiveError, match=r"knows of no energy: NVIDIA H200 reported none"):
        asked(tmp_path / "cold", ENERGY)


def test_a_place_without_a_study_says_so(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"there is no study in .*: it has no journal\.log"):
        recall(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "journal.log").write_text("")
    with pytest.raises(StudyError, match="there are no trials in"):
        recall(tmp_path)
    for broken in ("not a journal\nat all\n", '{"a": 1}\n{"b": 2}\n', "[]\n[]\n"):
        (tmp_path / "journal.log").write_text(broken)
        with pytest.raises(StudyError, match="cannot be read"):
            recall(tmp_path)


def test_a_database_is_read_back_too_and_its_password_is_nobodys_business(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    machine = recording()
    request = replace(request_in(tmp_path, machine.clock, trials=4), study=url)
    tune_with(machine, request, lambda _: None)
    record = recall(url)
    assert (record.where, record.last.run) == (url, request.run)
    assert without_password("postgresql://me:secret@host:5432/db") == "postgresql://me:***@host:5432/db"
    assert without_password("runs/small") == "runs/small"
    for url in (
        "mysql://u@x:a/secret@h/d",
        "postgresql://u:sec@ret@h/d",
        "postgresql://h/d?user=u&password=secret&x=1",
    ):
        assert "ret" not in without_password(url).replace("postgres", "")


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
        assert "secret" not in str(caught.value)
