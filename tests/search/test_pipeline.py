"""The whole search, driven by recorded trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from simulated.recorded import RecordedEvaluator, recorded_ms

from amptune.errors import AmptuneError, NothingFeasibleError, StudyError, UserCodeError
from amptune.measure.results.outcome import Effort, Failure, Outcome
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy
from amptune.search.api import tune
from amptune.search.decide.decision import Decision
from amptune.search.events import Event, SearchEnded, SearchStarted, TrialEnded
from amptune.search.pipeline import tune_with
from amptune.search.plan.budget import Budget, Clock
from amptune.search.request import TuningRequest
from amptune.search.space.candidates import Wanted

OOM = Failure(kind="oom", message="CUDA out of memory")


def request_in(
    folder: Path, clock: Clock, *, trials: int | None = 40, baseline: Policy = STOCK, **wanted: object
) -> TuningRequest:
    """A request whose budget is spent by the clock of its machine."""
    return TuningRequest(
        source=Source(target="recorded"),
        wanted=Wanted(baseline=baseline, **{"pins": {}, **wanted}),  # type: ignore[arg-type]  # by keyword
        budget=Budget(seconds=300, trials=trials, started=clock(), clock=clock),
        folder=folder,
        study=folder,
    )


def tuned_on(evaluator: RecordedEvaluator, folder: Path, **options: object) -> tuple[Decision, list[Event]]:
    events: list[Event] = []
    request = request_in(folder, evaluator.clock, **options)  # type: ignore[arg-type]
    return tune_with(evaluator, request, events.append), events


def test_a_baseline_whose_worker_dies_once_is_tried_again(tmp_path: Path) -> None:
    accidents = iter([Failure(kind="crash", message="gone")])
    evaluator = RecordedEvaluator("resnet50", interfere=lambda _: next(accidents, None))
    decision, _ = tuned_on(evaluator, tmp_path)
    assert evaluator.measured[:2] == [STOCK, STOCK]
    assert decision.speedup.value > 1


RAISED: Any = {"kind": "error", "exception": "KeyError", "message": "no such key", "where": "train.py:7"}


@pytest.mark.parametrize(
    ("failure", "error", "said", "measured"),
    [
        (OOM, NothingFeasibleError, r"the baseline \(stock PyTorch\) fails.*oom: CUDA out of memory", 1),
        (Failure(kind="crash", message="gone"), NothingFeasibleError, "crash: gone", 2),
        (Failure(**RAISED), UserCodeError, r"the training step raised KeyError: no such key \(train.py:7\)", 1),
    ],
)  # fmt: skip
def test_a_baseline_that_fails_ends_the_search_and_a_later_tuning_measures_it_again(
    failure: Failure, error: type[AmptuneError], said: str, measured: int, tmp_path: Path
) -> None:
    evaluator = RecordedEvaluator("resnet50", interfere=lambda policy: failure if policy == STOCK else None)
    with pytest.raises(error, match=said):
        tuned_on(evaluator, tmp_path)
    assert evaluator.measured == [STOCK] * measured
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=8)
    assert decision.speedup.value > 1


def test_a_baseline_that_fails_in_a_later_tuning_ends_it_at_once_with_that_failure(tmp_path: Path) -> None:
    tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=5)
    fails = RecordedEvaluator("resnet50", interfere=lambda policy: Failure(**RAISED) if policy == STOCK else None)
    with pytest.raises(UserCodeError, match="no such key"):
        tuned_on(fails, tmp_path, trials=5)
    assert fails.measured.count(STOCK) == 1
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=5)
    assert decision.speedup.value > 1


@dataclass
class Efforts(RecordedEvaluator):
    """A recorded machine that notes how it is asked to measure."""

    efforts: list[Effort] = field(default_factory=list)

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.efforts.append(effort)
        return super().measure(policy, effort)


def test_what_a_former_tuning_measured_neither_ends_a_trial_early_nor_stands_beside_it(tmp_path: Path) -> None:
    tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=3)
    machine = Efforts("resnet50")
    decision, events = tuned_on(machine, tmp_path, trials=3)
    ended = [event for event in events if isinstance(event, TrialEnded)]
    assert {event.baseline.run for event in ended if event.baseline} == {event.trial.run for event in ended}
    first, second, *later = [one for one in machine.efforts if not one.in_loop]
    assert first.abandon_above_ms is second.abandon_above_ms is None, "the machine may be slower now"
    assert all(one.abandon_above_ms for one in later)
    assert [entry["stage"] for entry in decision.timeline[:3]] == ["study", "build", "study"]


def test_a_small_space_is_measured_to_its_end(tmp_path: Path) -> None:
    pins = {"fp32_exclusions": "0", "cudnn_benchmark": "false", "compile": "off", "fused_optimizer": "false"}
    _, events = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=None, pins=pins)
    (because,) = [event.because for event in events if isinstance(event, SearchEnded)]
    assert because in ("every policy of the space is measured", "nothing that is left to try promises to be better")


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="cannot be used"):
        tune("amptune.workload.zoo:digits", study=tmp_path / "file" / "study", budget_s=5)


def test_a_storage_that_fills_up_ends_the_search_and_loses_nothing(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")

    def fill(_: Policy) -> None:
        if len(evaluator.measured) == 8:
            journal = tmp_path / "journal.log"
            journal.rename(tmp_path / "journal.gone")
            journal.mkdir()

    evaluator.interfere = fill
    decision, events = tuned_on(evaluator, tmp_path)
    because = next(e for e in events if isinstance(e, SearchEnded)).because
    assert "the study cannot be read or written" in because
    assert len(decision.trials) == 8
    assert recorded_ms("resnet50", decision.policy) < recorded_ms("resnet50", STOCK)


class NeverBuilt(RecordedEvaluator):
    """The workload must not be built: that takes long."""

    def prepare(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pins": {"autcast": "bf16"}}, "'autcast' is no knob of this search; did you mean autocast"),
        ({"pins": {"batch_size": "8"}}, "use --batch-size"),
        ({"space": "hoper"}, "did you mean hopper"),
    ],
)
def test_a_wrong_knob_value_or_space_is_told_before_the_workload_is_built(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(AmptuneError, match=said):
        tuned_on(NeverBuilt("resnet50"), tmp_path, **wrong)


def test_half_a_line_in_the_journal_is_dropped(tmp_path: Path) -> None:
    tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=5)
    with (tmp_path / "journal.log").open("a") as journal:
        journal.write('{"op_code": 3, "wor')
    _, events = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=1)
    assert next(event for event in events if isinstance(event, SearchStarted)).remembered == 5


def test_a_journal_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "journal.log").write_text("not a journal\n")
    with pytest.raises(StudyError, match=r"journal\.log:1: is no record of a study"):
        tuned_on(RecordedEvaluator("resnet50"), tmp_path)
