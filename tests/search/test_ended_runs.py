"""Runs that something ends or disturbs: the best so far is there, and what was lost is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated.recorded import RecordedEvaluator
from test_pipeline import request_in, tuned_on

from amptune.errors import StudyError
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.pipeline import TuningInterrupted, tune_with
from amptune.search.sampler.storage import Store, recall

KILLED = Failure(kind="killed", message="the worker was ended by SIGKILL")
RECIPE = amp_recipe("bf16")


def fails(*_: object) -> None:
    raise StudyError("no space left")


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError(), RuntimeError("no thread")])
def test_whatever_ends_a_run_the_best_so_far_is_there(error: Exception, tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")

    def end(_: Policy) -> None:
        if len(evaluator.measured) == 6:
            raise error

    evaluator.interfere = end
    with pytest.raises(TuningInterrupted) as caught:
        tuned_on(evaluator, tmp_path)
    assert caught.value.__cause__ is error
    decision = caught.value.decision
    assert decision is not None
    assert decision.provisional
    assert decision.policy != STOCK


def test_an_error_before_anything_is_known_is_raised_as_it_is(tmp_path: Path) -> None:
    def end(_: Policy) -> None:
        raise OSError("no files")

    with pytest.raises(OSError, match="no files"):
        tuned_on(RecordedEvaluator("resnet50", interfere=end), tmp_path)


def test_without_workers_to_judge_the_winner_what_is_known_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedEvaluator, "judge", fails)
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=6)
    assert len(decision.trials) >= 1


def test_a_policy_whose_worker_was_killed_is_tried_by_the_next_run(tmp_path: Path) -> None:
    killing = RecordedEvaluator("resnet50", interfere=lambda policy: None if policy == STOCK else KILLED)
    decision, _ = tuned_on(killing, tmp_path, trials=3)
    killed = [trial.policy for trial in decision.trials if trial.outcome == KILLED]
    assert len(killed) == 2
    assert [killing.measured.count(policy) for policy in killed] == [1, 1]
    study = recall(tmp_path)
    assert [trial.policy for trial in study.trials] == [STOCK]
    after = RecordedEvaluator("resnet50")
    tuned_on(after, tmp_path, trials=3)
    assert set(killed) & set(after.measured)


def test_one_that_is_killed_in_the_comparison_is_judged_by_the_rows_it_has(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")
    seen: list[Policy] = []

    def kill(policy: Policy) -> Failure | None:
        seen.append(policy)
        return KILLED if policy == RECIPE and seen.count(RECIPE) > 1 else None

    evaluator.interfere = kill
    decision, _ = tuned_on(evaluator, tmp_path)
    contender = decision.verdict.contender_of(RECIPE)
    assert contender is not None
    assert contender.failure is None


def test_rows_that_the_disk_has_no_room_for_are_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Store.keep
    monkeypatch.setattr(Store, "keep", lambda *given: fails() if given[1] == "row" else keep(*given))
    evaluator = RecordedEvaluator("resnet50")
    request = request_in(tmp_path, evaluator.clock)
    decision = tune_with(evaluator, request, lambda _: None)
    (lost,) = (finding.message for finding in decision.findings if finding.code == "not-recorded")
    assert lost == "no space left: later runs and `amptune report` lack some of what this run measured"
    assert not recall(tmp_path, run=request.run).rows
