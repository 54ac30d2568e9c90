"""The tuner's figure beside that of a training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from simulated.recorded import RecordedEvaluator
from test_pipeline import tuned_on

from amptune.measure.results.loop_timing import LoopTiming
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import Policy
from amptune.search.after_checks import checked_in_a_loop
from amptune.search.decide.decision import Decision
from amptune.search.plan.budget import Budget, loop_s


@dataclass
class RecordedLoop:
    """Stands for the workers: answers what it was given."""

    answer: LoopTiming | Failure
    trained: list[Policy] = field(default_factory=list)

    def train(self, policy: Policy, seconds: float, limit_s: float) -> LoopTiming | Failure:
        assert 0 < seconds < limit_s
        self.trained.append(policy)
        return self.answer


def timing(decision: Decision, *, slower: float, wait_ms: float = 0.0) -> LoopTiming:
    winner = decision.verdict.winner
    assert winner.step_ms is not None
    assert winner.samples_per_s is not None
    return LoopTiming(
        samples_per_s=winner.samples_per_s / slower,
        steps=100,
        seconds=100 * winner.step_ms * slower / 1000,
        wait_ms=wait_ms,
        copy_ms=0.0,
        step_ms=winner.step_ms,
        idle_ms=winner.step_ms * (slower - 1),
        host_ms=0.1,
    )


@pytest.fixture
def decision(tmp_path: Path) -> Decision:
    return tuned_on(RecordedEvaluator("resnet50"), tmp_path)[0]


def test_a_loop_that_agrees_stands_in_the_evidence(decision: Decision) -> None:
    loop = RecordedLoop(timing(decision, slower=1.01))
    found = checked_in_a_loop(loop, decision, Budget(seconds=300))
    assert loop.trained == [decision.verdict.winner.policy]
    assert found.policy_file.evidence["end_to_end"]["steps"] == 100
    assert "agrees with the tuner's" in str(found.findings[-1])
    assert found.policy_file.evidence["findings"][-1]["code"] == "end-to-end"


def test_a_loop_that_waits_for_its_data_says_so(decision: Decision) -> None:
    loop = RecordedLoop(timing(decision, slower=1.5, wait_ms=1000.0))
    found = checked_in_a_loop(loop, decision, Budget(seconds=300))
    assert [finding.code for finding in found.findings[-2:]] == ["end-to-end", "input-bound"]


def test_a_loop_that_fails_costs_neither_the_policy_nor_its_claim(decision: Decision) -> None:
    loop = RecordedLoop(Failure(kind="error", message="no such file: train.csv"))
    found = checked_in_a_loop(loop, decision, Budget(seconds=300))
    assert found.policy == decision.policy
    assert found.speedup == decision.speedup
    assert "the training loop with fresh data failed: error: no such file" in str(found.findings[-1])


@pytest.mark.parametrize("seconds", [10.0, 30.0])
def test_a_small_budget_has_no_time_for_a_loop(decision: Decision, seconds: float) -> None:
    loop = RecordedLoop(Failure(kind="error", message="never asked"))
    assert loop_s(Budget(seconds=seconds)) == 0.0
    assert checked_in_a_loop(loop, decision, Budget(seconds=seconds)) is decision


def test_the_evidence_keeps_the_order_of_the_format(decision: Decision) -> None:
    found = checked_in_a_loop(RecordedLoop(timing(decision, slower=1.0)), decision, Budget(seconds=300))
    keys = list(found.policy_file.evidence)
    assert keys.index("ablation") < keys.index("end_to_end") < keys.index("findings") < keys.index("finalists")
