"""Rounds after the search, on a recorded machine whose time passes only by what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from amptune.search.narrowing import Narrowing
from simulated.recorded import RecordedEvaluator
from tables import BF16, BF16_LAST, FP16, block, row

from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy
from amptune.search.plan.budget import Budget
from amptune.search.table.effects import GPU
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of

TRUE_MS = {STOCK: 10.0, BF16: 5.0, FP16: 5.1, BF16_LAST: 7.0}
OOM, CRASH, TIMEOUT = (Failure(kind=kind, message="gone") for kind in ("oom", "crash", "timeout"))
# What a turn in the user's loop gives in place of what was measured.
InLoop = Callable[[Outcome], Outcome]


@dataclass
class Noting(RecordedEvaluator):
    """A recorded machine that notes whether it measures in the loop."""

    in_loop: list[bool] = field(default_factory=list)
    turn: InLoop = lambda outcome: outcome

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.in_loop.append(effort.in_loop)
        outcome = super().measure(policy, effort)
        return self.turn(outcome) if effort.in_loop else outcome


class Bench:
    """A narrowing with all that it talks to, and the rows of the search before it."""

    def __init__(self, *tried: Policy, seconds: float = 300.0) -> None:
        self.machine = Noting("resnet50", noise=0.002, true_ms=TRUE_MS.__getitem__)
        blocks = {policy: block(TRUE_MS[policy], samples_per_step=self.machine.batch_size) for policy in tried}
        self.rows: list[Row] = [row(policy, one, run="this", launch="search") for policy, one in blocks.items()]
        self.narrowing = Narrowing(
            evaluator=self.machine,
            budget=Budget(seconds=seconds, started=0.0, clock=self.machine.clock),
            observer=lambda _: None,
            run="this",
            verdict=lambda: verdict_of(self.rows, STOCK, GPU),
            keep=self.rows.append,
            start_s=RecordedEvaluator.launch_s,
        )

    def until_known(self) -> Verdict:
        """Rounds until more tell little, or the budget is spent."""
        while (step := self.narrowing.wants()) is not None:
            self.narrowing.take(step, step.seconds)
        verdict = self.narrowing.verdict()
        assert verdict is not None
        return verdict


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
    left = iter(failures)
    bench = Bench(seconds=seconds)
    bench.machine.interfere = lambda policy: next(left, None) if policy == BF16 else None
    bench.narrowing.round_of((STOCK, BF16, FP16))
    outcomes = [one.outcome for one in bench.rows if one.policy == BF16]
    assert [one.kind if isinstance(one, Failure) else "measured" for one in outcomes] == kinds
    assert bench.machine.measured.count(BF16) == len(failures) + (kinds == ["measured"])
    if kinds and kinds != ["measured"]:
        bench.until_known()
        assert BF16 not in bench.machine.launched[-1]


def test_a_loader_that_fails_leaves_the_steps_to_decide_and_is_told() -> None:
    bench = Bench(*TRUE_MS)
    bench.machine.turn = lambda _: Failure(kind="error", message="no file: train.csv", exception=LOADER_FAILED)
    bench.until_known()
    assert bench.machine.in_loop.count(True) == 1
    assert all(isinstance(one.outcome, Measurement) for one in bench.rows)
    (finding,) = bench.narrowing.findings
    assert finding.code == "loader-failed"
    assert "train.csv" in str(finding)


def test_a_loop_that_waits_for_its_data_is_given_up_for_steps() -> None:
    bench = Bench(*TRUE_MS)
    bench.machine.turn = lambda one: replace(one, wait_share=0.5) if isinstance(one, Measurement) else one
    assert bench.until_known().winner.policy == BF16
    assert (bench.machine.in_loop[0], bench.machine.in_loop[-1]) == (True, False)
