"""What a study answers without measuring again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from simulated.recorded import RecordedEvaluator
from test_objective import BF16, ENERGY, FP16, MEMORY, peak_mib, recording, speed_costs_memory
from test_pipeline import request_in

from amptune.errors import NothingFeasibleError, ObjectiveError, StudyError
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity
from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.decide.samples import FILE_NAME, KeptComparison, comparisons_of, keeping_samples, read_comparisons
from amptune.search.decide.study_report import StudyReport, command_of, decision_record_of, findings_of, study_report_of
from amptune.search.events import ContenderMeasured, Event
from amptune.search.pipeline import TuningInterrupted, tune_with
from amptune.search.plan.budget import Budget
from amptune.search.sampler.records import StudyRecord, without_password
from amptune.search.sampler.storage import recall
from amptune.search.space.candidates import GlobalBatch
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.ratio import Round

SMALLEST = amp_recipe("bf16", memory_format="channels_last")


def tuned(
    folder: Path,
    evaluator: RecordedEvaluator | None = None,
    objective: Objective = THROUGHPUT,
    *,
    trials: int = 30,
    baseline: Policy = STOCK,
) -> Decision:
    pins = {"cuda_graphs": "false"}  # which were not recorded
    request = replace(request_in(folder, trials=trials, baseline=baseline, pins=pins), objective=objective)
    observer = keeping_samples(folder, lambda _: None, request.run)
    return tune_with(evaluator or recording(), request, observer)


def asked(folder: Path, objective: Objective, *, alone: bool = False) -> StudyReport:
    record = recall(folder)
    runs = [tuning.run for tuning in record.tunings]
    return study_report_of(record, () if alone else read_comparisons(folder, runs), objective)


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
    assert study_report.decision.policy == expected
    assert study_report.decision.speedup.value == pytest.approx(
        speed_costs_memory(STOCK) / speed_costs_memory(expected), rel=0.02
    )
    if objective == THROUGHPUT:
        assert study_report.is_proven
        assert study_report.decision.gain.value == pytest.approx(decision.gain.value, rel=0.01)
    if objective.name == "memory":
        assert study_report.decision.gain.value == pytest.approx(peak_mib(STOCK) / peak_mib(expected))


def test_what_rests_on_single_trials_says_so_and_how_to_prove_it(tmp_path: Path) -> None:
    tuned(tmp_path)
    study_report = asked(tmp_path, Objective("memory", 0.85), alone=True)
    assert (study_report.decision.policy, study_report.decision.basis) == (SMALLEST, "trial")
    words = "bf16, channels_last: uses 0.32 times the memory of the baseline at 0.9"
    assert study_report.sentence.startswith(words)
    assert study_report.grounds == "by a trial or two beside the baseline's: not proven"
    command = f"amptune tune recorded --set cuda_graphs=false --objective memory --least-speed 0.85 --study {tmp_path}"
    assert command_of(study_report) == command
    assert [finding.code for finding in findings_of(study_report)][:2] == ["answer", "not-proven"]
    assert command in str(findings_of(study_report)[1])


def test_the_command_that_proves_an_answer_has_the_wishes_that_make_it_the_same_study(tmp_path: Path) -> None:
    wishes = {"pins": {"autocast": "bf16"}, "batch_size": 128, "global_batch": GlobalBatch(samples=512, devices=2)}
    request = request_in(tmp_path, trials=4, baseline=BF16, **wishes, compile=False, memory_mib=61440.0)
    tune_with(recording(), replace(request, device="cuda:1"), lambda _: None)
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
    assert (study_report.decision.policy, study_report.decision.basis) == (FP16, "comparison")
    assert study_report.grounds.startswith("by comparison with the baseline in ")
    assert [one.variant.setting for one in study_report.ablation] == ["autocast"]
    assert study_report.ablation[0].buys.value == pytest.approx(2.0)


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
    assert study_report.decision.policy.autocast == "fp16"
    assert not any(point.policy.autocast == "bf16" for point in study_report.front)
    assert any("bf16" in str(one) for one in findings_of(study_report) if one.code == "rejected")


def test_what_the_wishes_do_not_allow_is_no_answer(tmp_path: Path) -> None:
    request = request_in(tmp_path, trials=12, pins={"autocast": "fp16"})
    tune_with(recording(), request, keeping_samples(tmp_path, lambda _: None, request.run))
    for alone in (False, True):
        study_report = asked(tmp_path, THROUGHPUT, alone=alone)
        assert study_report.decision.policy.autocast == "fp16"
    assert BF16 in {contender.policy for contender in asked(tmp_path, THROUGHPUT).contenders}


def test_what_a_decision_claims_is_what_its_page_shows(tmp_path: Path) -> None:
    decision = tuned(tmp_path)
    kept = decision_record_of(decision)
    assert (kept.policy, kept.gain, kept.basis) == (decision.winner, decision.gain, "comparison")


def test_a_study_answers_what_its_last_tuning_decided_where_nothing_was_proven(tmp_path: Path) -> None:
    """Trials and half a comparison can be weighed in more ways than one."""
    evaluator = recording()
    gone = Failure(kind="crash", message="gone")
    evaluator.interfere = lambda policy: gone if len(evaluator.measured) > 32 and policy == STOCK else None
    decision = tuned(tmp_path, evaluator)
    assert decision.provisional
    record = recall(tmp_path)
    assert record.decided == {record.last.run: decision_record_of(decision)}
    assert asked(tmp_path, THROUGHPUT).decision == decision_record_of(decision)
    other = replace(decision_record_of(decision), policy=FP16)
    changed = replace(record, decided={record.last.run: other})
    assert study_report_of(changed, (), THROUGHPUT).decision == other
    assert study_report_of(changed, (), MEMORY).decision == study_report_of(record, (), MEMORY).decision
    later = replace(record.last, run="later", began="9999")
    assert study_report_of(replace(changed, tunings=(*record.tunings, later)), (), THROUGHPUT).decision.policy != FP16


def test_a_comparison_of_an_earlier_tuning_speaks_against_what_single_trials_say(tmp_path: Path) -> None:
    """The last tunings have no comparison, as the baseline dies in it."""
    first, own = tuned(tmp_path), policy_to_dict(STOCK)
    evaluator = recording()
    evaluator.interfere = lambda policy: Failure(kind="crash", message="gone") if policy == STOCK else None
    samples = tmp_path / FILE_NAME
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    samples.write_text("")
    by_trials = tuned(tmp_path, evaluator, trials=1).winner
    both = [line for line in lines if line["policy"] in (own, policy_to_dict(first.winner))]
    as_slow = next(line["outcome"] for line in both if line["policy"] == own)
    for line in both:
        policy = own if line["policy"] == own else policy_to_dict(by_trials)
        line |= {"policy": policy, "outcome": as_slow}
    samples.write_text("\n".join(map(json.dumps, both)) + "\n")
    again = tuned(tmp_path, evaluator, trials=1)
    assert again.provisional
    assert again.winner != by_trials
    assert "no round of a comparison speaks against it" in again.findings[0].message


def test_a_tuning_whose_baseline_failed_does_not_hide_the_one_before(tmp_path: Path) -> None:
    decision = tuned(tmp_path)
    evaluator = recording()
    evaluator.interfere = lambda _: Failure(kind="oom", message="above the 100 MiB allowed")
    with pytest.raises(NothingFeasibleError):
        tune_with(evaluator, request_in(tmp_path, memory_mib=100.0), lambda _: None)
    assert asked(tmp_path, THROUGHPUT).decision.policy == decision.winner


def test_the_answer_of_an_interrupted_tuning_rests_on_its_trials(tmp_path: Path) -> None:
    evaluator = recording()

    def interrupt(_: Policy) -> None:
        if len(evaluator.measured) == 8:
            raise KeyboardInterrupt

    evaluator.interfere = interrupt
    with pytest.raises(TuningInterrupted):
        tuned(tmp_path, evaluator)
    study_report = asked(tmp_path, THROUGHPUT)
    assert (study_report.decision.policy.autocast, study_report.decision.basis) == ("bf16", "trial")
    assert study_report.sentence.endswith("times the speed of the baseline")


def test_what_an_earlier_tuning_compared_does_not_speak_for_one_that_was_interrupted(tmp_path: Path) -> None:
    """The earlier one knew of bf16 alone; the last one has tried what is faster, and compared nothing."""
    tuned(tmp_path, RecordedEvaluator("resnet50", noise=0.002), trials=12)
    record = recall(tmp_path)
    seen = {trial.policy: trial.outcome for trial in record.trials}
    rounds = [Round(launch=i // 3, outcomes={policy: seen[policy] for policy in (STOCK, BF16)}) for i in range(9)]
    earlier = KeptComparison(run=record.last.run, stage="finals", rounds=tuple(rounds))
    told = study_report_of(record, [earlier], THROUGHPUT)
    assert (told.decision.policy, told.decision.basis) == (BF16, "comparison")
    last = replace(record, tunings=(*record.tunings, replace(record.last, run="interrupted")))
    study_report = study_report_of(last, [earlier], THROUGHPUT)
    assert (study_report.decision.policy.memory_format, study_report.decision.basis) == ("channels_last", "trial")


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


def test_rounds_of_different_runs_and_comparisons_are_told_apart(tmp_path: Path) -> None:
    tuned(tmp_path, trials=8)
    first = (tmp_path / FILE_NAME).read_text()
    tuned(tmp_path, trials=1)
    record = recall(tmp_path)
    runs = [tuning.run for tuning in record.tunings]
    kept = read_comparisons(tmp_path, runs)
    assert {one.run for one in kept} == set(runs)
    assert read_comparisons(tmp_path, runs[:1]) == comparisons_of(map(json.loads, first.splitlines()))
    assert all(
        set(one.outcomes) <= set(comparison.rounds[0].outcomes) for comparison in kept for one in comparison.rounds
    )
    assert kept[0].stage == "finals"
    assert kept[-1].stage == "ablation"


def test_rounds_are_put_together_as_they_were_measured(tmp_path: Path) -> None:
    events: list[Event] = []
    request = request_in(tmp_path, trials=8)
    observer = keeping_samples(tmp_path, events.append, request.run)
    tune_with(recording(), request, observer)
    blocks = [event for event in events if isinstance(event, ContenderMeasured)]
    read = [
        (comparison.stage, one.launch, policy, outcome)
        for comparison in read_comparisons(tmp_path, [request.run])
        for one in comparison.rounds
        for policy, outcome in one.outcomes.items()
    ]
    assert read == [(block.stage, block.launch, block.policy, block.outcome) for block in blocks]


def test_a_line_cut_by_a_crash_costs_that_line(tmp_path: Path) -> None:
    tuned(tmp_path, trials=6)
    runs = [tuning.run for tuning in recall(tmp_path).tunings]
    whole = read_comparisons(tmp_path, runs)
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"run": "' + runs[0])
    assert read_comparisons(tmp_path, runs) == whole


def test_a_line_of_another_amptune_costs_that_line(tmp_path: Path) -> None:
    tuned(tmp_path, trials=6)
    runs = [tuning.run for tuning in recall(tmp_path).tunings]
    whole = read_comparisons(tmp_path, runs)
    first = (tmp_path / FILE_NAME).read_text().splitlines()[0]
    with (tmp_path / FILE_NAME).open("a") as file:
        for was, now in (
            ('"outcome"', '"result"'),
            ('"comparison"', '"compared"'),
            ('"autocast": "', '"autocast": "very '),
        ):
            file.write(first.replace(was, now) + "\n")
    assert read_comparisons(tmp_path, runs) == whole


def test_of_several_studies_that_which_was_tuned_last_is_taken_though_it_had_no_new_trial(tmp_path: Path) -> None:
    tuned(tmp_path, RecordedEvaluator("resnet50"), trials=1)
    tuned(tmp_path, RecordedEvaluator("vgg16_cifar"), trials=4)
    request = replace(request_in(tmp_path), budget=Budget(seconds=0.1))
    tune_with(RecordedEvaluator("resnet50"), request, lambda _: None)
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
    without = replace(record, trials=tuple(trial for trial in record.trials if trial.policy != STOCK))
    with pytest.raises(StudyError, match=r"the baseline of the study resnet50-\w+ \(stock PyTorch\) was not measured"):
        study_report_of(without, (), THROUGHPUT)
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
    request = replace(request_in(tmp_path, trials=4), study=url)
    tune_with(recording(), request, lambda _: None)
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
