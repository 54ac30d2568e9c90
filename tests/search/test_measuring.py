"""Rounds: who is measured again, and what is timed where the user's loop cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from simulated.recorded import RecordedEvaluator
from test_pipeline import tuned_on

from amptune.measure.results.loop_timing import LoaderTrial
from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Measurement, Outcome
from amptune.measure.results.subject import Prepared
from amptune.policy.settings import STOCK, Loader, Policy, amp_recipe
from amptune.report.answer import answer_of
from amptune.search.measuring import RoundMeasurer
from amptune.search.plan.budget import Budget
from amptune.search.table.row import Row

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
TRUE_MS = {STOCK: 10.0, BF16: 5.0, FP16: 5.1}
OOM, CRASH, TIMEOUT = (Failure(kind=kind, message="gone") for kind in ("oom", "crash", "timeout"))
OWN = LoaderTrial(settings=Loader(), step_ms=30.0, wait_share=0.5)
FASTER = LoaderTrial(settings=Loader(num_workers=2), step_ms=10.0, wait_share=0.01)
# What a turn in the user's loop gives in place of what was measured.
InLoop = Callable[[Outcome], Outcome]


@dataclass
class Noting(RecordedEvaluator):
    """A recorded machine that notes whether it measures in the loop."""

    in_loop: list[bool] = field(default_factory=list)
    turn: InLoop = lambda outcome: outcome
    loader: tuple[LoaderTrial, ...] = ()
    tried: list[Policy] = field(default_factory=list)

    def prepare(self, limit_s: float) -> Prepared:
        return replace(super().prepare(limit_s), has_data_loader=bool(self.loader))

    def try_loaders(self, policy: Policy, seconds: float) -> tuple[LoaderTrial, ...]:
        self.clock.advance(seconds)
        self.tried.append(policy)
        return self.loader

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.in_loop.append(effort.in_loop)
        outcome = super().measure(policy, effort)
        return self.turn(outcome) if effort.in_loop else outcome


def rounds_on(machine: RecordedEvaluator, rows: list[Row], seconds: float = 300.0) -> RoundMeasurer:
    budget = Budget(seconds=seconds, started=0.0, clock=machine.clock)
    return RoundMeasurer(evaluator=machine, budget=budget, observer=lambda _: None, run="this", keep=rows.append)


@pytest.mark.parametrize(
    ("seconds", "failures", "kinds"),
    [
        (300.0, [CRASH], ["measured"]),  # an accident
        (300.0, [OOM], ["oom"]),  # which is no accident
        (1000.0, [TIMEOUT, TIMEOUT], ["timeout"]),
        (100.0, [TIMEOUT], []),  # the budget cut its limit
    ],
)
def test_one_accident_is_measured_again_and_what_the_budget_cuts_says_nothing(
    seconds: float, failures: list[Failure], kinds: list[str]
) -> None:
    left, rows = iter(failures), list[Row]()
    machine = Noting("resnet50", noise=0.002, true_ms=TRUE_MS.__getitem__)
    machine.interfere = lambda policy: next(left, None) if policy == BF16 else None
    measurer = rounds_on(machine, rows, seconds)
    is_whole = measurer.measure((STOCK, BF16, FP16), {}, fresh=True, until_s=seconds)
    assert is_whole is bool(kinds)
    outcomes = [one.outcome for one in rows if one.policy == BF16]
    assert [one.kind if isinstance(one, Failure) else "measured" for one in outcomes] == kinds
    assert machine.measured.count(BF16) == len(failures) + (kinds == ["measured"])


def test_what_decides_is_measured_before_time_is_short() -> None:
    machine, rows = Noting("resnet50", true_ms=TRUE_MS.__getitem__), list[Row]()
    measurer = rounds_on(machine, rows)
    assert measurer.measure((STOCK, BF16, FP16), {}, fresh=True, until_s=300.0)
    began_s = machine.clock()
    assert not measurer.measure((STOCK, BF16, FP16), {}, fresh=False, until_s=began_s + 5.0)
    assert {one.policy for one in rows[3:]} == {STOCK, BF16}


def test_a_loader_that_fails_leaves_the_steps_to_decide_and_is_told(tmp_path: Path) -> None:
    machine = Noting("resnet50")
    machine.turn = lambda _: Failure(kind="error", message="no file: train.csv", exception=LOADER_FAILED)
    decision, _ = tuned_on(machine, tmp_path)
    assert machine.in_loop.count(True) == 1
    (finding,) = [one for one in decision.findings if one.code == "loader-failed"]
    assert "train.csv" in str(finding)


def test_a_loop_that_waits_for_its_data_is_given_up_for_steps(tmp_path: Path) -> None:
    machine = Noting("resnet50")
    machine.turn = lambda one: replace(one, wait_share=0.5) if isinstance(one, Measurement) else one
    decision, _ = tuned_on(machine, tmp_path)
    assert True in machine.in_loop
    assert machine.in_loop[-1] is False
    assert not decision.keeps_the_baseline
    assert decision.policy.loader is None


def test_settings_of_a_loader_that_the_loop_waits_for_are_tried_for_the_winner_alone(tmp_path: Path) -> None:
    machine = Noting("resnet50", loader=(OWN, FASTER, OWN))
    machine.turn = lambda one: replace(one, wait_share=0.5) if isinstance(one, Measurement) else one
    decision, _ = tuned_on(machine, tmp_path)
    assert machine.tried == [decision.verdict.winner.policy]
    assert decision.policy.loader == FASTER.settings
    (finding,) = [one for one in decision.findings if one.code in ("loader", "input-bound")]
    assert "2 worker processes" in finding.message
    assert "10 in place of 30 ms" in answer_of(decision, "policy.yaml")[0]
    assert decision.seconds <= 300


def test_settings_that_are_no_better_are_told_beside_the_wait(tmp_path: Path) -> None:
    machine = Noting("resnet50", loader=(OWN, LoaderTrial(settings=FASTER.settings, error="no shared memory")))
    machine.turn = lambda one: replace(one, wait_share=0.5) if isinstance(one, Measurement) else one
    decision, _ = tuned_on(machine, tmp_path)
    assert decision.policy.loader is None
    (finding,) = [one for one in decision.findings if one.code in ("loader", "input-bound")]
    assert "no shared memory" in finding.message
