"""Rounds after the search, on a recorded machine whose time passes only by what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
from simulated.recorded import Interference, RecordedEvaluator
from tables import BF16, BF16_LAST, FP16, block, row

from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy
from amptune.search.events import Event
from amptune.search.narrowing import Narrowing
from amptune.search.plan.budget import Budget
from amptune.search.table.effects import GPU
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of

BLOCK_S, LAUNCH_S = RecordedEvaluator.takes_s, RecordedEvaluator.launch_s
TRUE_MS = {STOCK: 10.0, BF16: 5.0, FP16: 5.1, BF16_LAST: 7.0}
OOM, CRASH, TIMEOUT = (Failure(kind=kind, message="gone") for kind in ("oom", "crash", "timeout"))


@dataclass
class Noting(RecordedEvaluator):
    """A recorded machine that notes with which effort it measures."""

    efforts: list[Effort] = field(default_factory=list)

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.efforts.append(effort)
        return super().measure(policy, effort)


@dataclass(kw_only=True)
class Bench:
    """A narrowing with all that it talks to. `times_ms` are the true times of a step."""

    times_ms: dict[Policy, float] = field(default_factory=lambda: dict(TRUE_MS))
    seconds: float = 300.0
    noise: float = 0.002
    bar: Callable[[Policy], str | None] = lambda _: None
    unseen: Callable[[Policy], Iterable[Policy]] = lambda _: ()
    rejects: Callable[[Policy], bool] = lambda _: False
    interfere: Interference = lambda _: None
    start_s: float = LAUNCH_S
    kind: type[Noting] = Noting
    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = self.kind(
            "resnet50",
            noise=self.noise,
            interfere=self.interfere,
            true_ms=self.times_ms.__getitem__,
        )
        self.narrowing = Narrowing(
            evaluator=self.machine,
            budget=Budget(seconds=self.seconds, started=0.0, clock=self.machine.clock),
            observer=self.events.append,
            run="this run",
            verdict=self.verdict,
            keep=self.rows.append,
            bar=self.bar,
            unseen=self.unseen,
            rejects=self.rejects,
            start_s=self.start_s,
        )

    def verdict(self) -> Verdict | None:
        return verdict_of(self.rows, STOCK, GPU, bar=self.bar)

    def until_known(self) -> None:
        """Rounds until more tell little, or the budget is spent."""
        while (step := self.narrowing.wants()) is not None:
            self.narrowing.take(step, step.seconds)

    def known(self, *policies: Policy) -> Verdict:
        """The verdict after a round of these policies, and rounds until it is known."""
        self.narrowing.round_of(policies)
        self.until_known()
        verdict = self.verdict()
        assert verdict is not None
        return verdict

    def tried(self, *policies: Policy) -> None:
        """Has a row of each, as of the search."""
        samples = self.machine.batch_size
        blocks = {policy: block(self.times_ms[policy], samples_per_step=samples) for policy in policies}
        self.rows += [row(policy, one, run="this run", launch="search") for policy, one in blocks.items()]

    @property
    def spent_s(self) -> float:
        return self.machine.clock()

    def kinds_of(self, policy: Policy) -> list[str]:
        outcomes = [one.outcome for one in self.rows if one.policy == policy]
        return [outcome.kind if isinstance(outcome, Failure) else "measured" for outcome in outcomes]


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_a_plain_gain_is_confirmed_in_a_few_rounds_of_the_baseline_and_the_leader() -> None:
    bench = Bench()
    verdict = bench.known(STOCK, BF16, FP16, BF16_LAST)
    assert (verdict.winner.policy, verdict.confidence) == (BF16, "confirmed")
    assert len(bench.machine.launched) >= 2, "a launch of its own confirms"
    assert all({STOCK, BF16} <= set(policies) for policies in bench.machine.launched)
    assert bench.machine.measured.count(BF16_LAST) == 1 < bench.machine.measured.count(BF16)
    assert bench.spent_s < 100


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "failures", "kinds"),
    [
        (300.0, [CRASH], ["measured"]),  # an accident
        (300.0, [CRASH, CRASH], ["crash"]),
        (300.0, [OOM], ["oom"]),  # which is no accident
        (1000.0, [TIMEOUT, TIMEOUT], ["timeout"]),
        (100.0, [TIMEOUT], []),  # the budget cut its limit
        (100.0, [CRASH, TIMEOUT], []),
    ],
)
def test_one_accident_is_measured_again_and_what_the_budget_cuts_says_nothing(
    seconds: float, failures: list[Failure], kinds: list[str]
) -> None:
    left = iter(failures)
    bench = Bench(seconds=seconds, interfere=lambda policy: next(left, None) if policy == BF16 else None)
    bench.narrowing.round_of((STOCK, BF16, FP16))
    assert bench.kinds_of(BF16) == kinds
    assert bench.machine.measured.count(BF16) == len(failures) + (kinds == ["measured"])
    if kinds and kinds != ["measured"]:
        bench.until_known()
        assert BF16 not in bench.machine.launched[-1]


# --- who may win ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unsound", [{BF16}, {BF16, FP16}])
def test_a_rejected_leader_is_replaced_before_time_is_spent_on_it(unsound: set[Policy]) -> None:
    judged: list[Policy] = []

    def rejects(policy: Policy) -> bool:
        judged.append(policy)
        return policy in unsound

    def bar(policy: Policy) -> str | None:
        return "not as good as FP32" if policy in judged and policy in unsound else None

    bench = Bench(rejects=rejects, bar=bar)
    bench.tried(STOCK, BF16, FP16)
    bench.until_known()
    verdict = bench.verdict()
    assert verdict is not None
    assert judged[:2] == [BF16, FP16]
    assert not unsound & set(bench.machine.measured)
    assert verdict.winner.policy == (FP16 if FP16 not in unsound else STOCK)
    assert bool(bench.machine.measured) == (FP16 not in unsound)


# --- the user's loop --------------------------------------------------------------------------------------------------


def test_a_loader_that_fails_leaves_the_steps_to_decide_and_is_told() -> None:
    broken = Failure(kind="error", message="no such file: train.csv", exception=LOADER_FAILED)

    class Loaderless(Noting):
        def measure(self, policy: Policy, effort: Effort) -> Outcome:
            outcome = super().measure(policy, effort)
            return broken if effort.in_loop else outcome

    bench = Bench(kind=Loaderless)
    bench.tried(*TRUE_MS)
    bench.until_known()
    assert [effort.in_loop for effort in bench.machine.efforts].count(True) == 1
    assert all(isinstance(one.outcome, Measurement) for one in bench.rows)
    (finding,) = bench.narrowing.findings
    assert finding.code == "loader-failed"
    assert "train.csv" in str(finding)


def test_a_loop_that_waits_for_its_data_is_given_up_for_steps() -> None:
    class Waiting(Noting):
        def measure(self, policy: Policy, effort: Effort) -> Outcome:
            outcome = super().measure(policy, effort)
            assert isinstance(outcome, Measurement)
            return replace(outcome, wait_share=0.5) if effort.in_loop else outcome

    bench = Bench(kind=Waiting)
    bench.tried(*TRUE_MS)
    bench.until_known()
    in_loop = [effort.in_loop for effort in bench.machine.efforts]
    assert in_loop[0]
    assert not in_loop[-1]
    verdict = bench.verdict()
    assert verdict is not None
    assert verdict.winner.policy == BF16
