"""The model of the table, by tables whose truth is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import took
from tables import BF16, BF16_LAST, FP16, Drawn, block, equals, in_turn, row

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import STOCK, Policy
from amptune.search.table.effects import CPU, GPU, Machine
from amptune.search.table.model import Estimates, fit
from amptune.search.table.objective import THROUGHPUT, objective_of
from amptune.search.table.ratio import CONFIRMED, LIKELY, Ratio
from amptune.search.table.row import Row

BOTH = pytest.mark.parametrize("machine", [GPU, CPU], ids=lambda machine: str(machine.device))
SPREADS = {"cuda": 0.005, "cpu": 0.08}


def estimated(rows: Sequence[Row], machine: Machine = GPU) -> Estimates:
    found = fit(rows, STOCK, THROUGHPUT.score, machine)
    assert found is not None
    return found


def measured(rows: Sequence[Row], machine: Machine = GPU, policy: Policy = BF16, other: Policy = STOCK) -> Ratio:
    """The ratio from the two policies' own rows."""
    ratio = estimated(rows, machine).between(policy, other)
    assert ratio is not None
    return ratio


# --- an interval is about a later sitting -----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("runs", "launches", "rounds", "rivals"),
    [(1, 1, 1, (FP16, BF16_LAST)), (1, 3, 2, ()), (3, 1, 2, ())],
    ids=["single trials", "launches", "runs"],
)
def test_the_interval_holds_what_a_later_sitting_shows_about_as_often_as_it_says(
    machine: Machine, runs: int, launches: int, rounds: int, rivals: tuple[Policy, ...]
) -> None:
    """Of 40 tables, in which each effect is between half and twice as large as expected."""
    held = shrunk_held = 0
    for seed in range(40):
        times_ms = {STOCK: 10.0, BF16: 9.0, **dict.fromkeys(rivals, 9.5)}
        table = Drawn(machine, times_ms, SPREADS[machine.device], seed=seed, wide=2.0)
        for run, launch in itertools.product(range(runs), range(launches)):
            table.rounds(rounds, run=f"run {run}", launch=str(launch), start_s=100.0 * launch)
        truth, found = table.later(BF16, STOCK), estimated(table.rows, machine)
        own, shrunk = found.between(BF16, STOCK), found.to_baseline(BF16)
        assert own is not None
        assert shrunk is not None
        held += own.low <= truth <= own.high
        shrunk_held += shrunk.low <= truth <= shrunk.high
    assert min(held, shrunk_held) >= 0.9 * 40


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    times=st.floats(0.001, 1000.0),
    random=st.randoms(use_true_random=False),
    machine=st.sampled_from([GPU, CPU]),
)
def test_neither_the_order_of_rows_nor_their_unit_nor_a_policy_of_another_run_changes_a_ratio(
    seed: int, times: float, random: Random, machine: Machine
) -> None:
    table = Drawn(machine, {STOCK: 10.0, BF16: 9.0, FP16: 9.5}, 0.01, seed=seed)
    for run in ("1", "2"):
        table.rounds(3, run=run)
    alone = [row(BF16_LAST, 5.0, run="3")]
    changed = [
        replace(one, outcome=block(times * one.outcome.mean_ms, 0.01))
        for one in random.sample(table.rows, len(table.rows))
        if isinstance(one.outcome, Measurement)
    ]
    for policy in (BF16, FP16):
        found, other = (measured(rows, machine, policy) for rows in (table.rows, [*changed, *alone]))
        assert (other.value, other.low, other.high) == pytest.approx((found.value, found.low, found.high), rel=1e-5)
    assert estimated([*changed, *alone], machine).between(BF16_LAST, STOCK) is None


# --- examples ---------------------------------------------------------------------------------------------------------


def test_runs_have_levels_of_their_own_and_a_policy_of_both_links_them() -> None:
    rows = [*in_turn({STOCK: [800.0], FP16: [780.0]}, run="1"), *in_turn({FP16: [10.0], BF16: [5.0]})]
    assert measured(rows).value == pytest.approx(800 / 780 * 2, rel=1e-3)
    trials, loops = [row(STOCK, 10.0), row(BF16, 5.0)], [row(STOCK, block(13.0, in_loop=True), moment_s=9.0)]
    assert measured([*trials, *loops]).value == pytest.approx(2.0, rel=0.02), "the loop takes longer for all"


WAITING = block(70.0, host_delay=0.5, contaminated_by=("host-load",))
NINE, BY_LAUNCH = [10.0, 10.02, 9.98] * 3, [9.0, 9.01, 9.02, 9.1, 9.11, 9.09, 10.1, 10.12, 10.1]
EVEN = {STOCK: [10.0] * 6, BF16: [9.0] * 6}
HOT = block(9.0, contaminated_by=("hw-thermal",))
SLOW_STEP = replace(took(), step_ms=(*[8.0] * 30, 40.0))
WIDER = {
    "launches that differ": (in_turn({STOCK: NINE, BF16: BY_LAUNCH}, per_launch=3), {STOCK: NINE, BF16: [9.4] * 9}),
    "steps that wait for the host": (in_turn(EVEN, spread=0.1), EVEN),
    "disturbed blocks": (in_turn({**EVEN, BF16: [HOT] * 6}, per_launch=3), EVEN),
    "a policy's only block": (in_turn({policy: ms[:1] for policy, ms in EVEN.items()}), EVEN),
    "a few slow steps": (in_turn({**EVEN, BF16: [SLOW_STEP] * 6}), EVEN),
}


@pytest.mark.parametrize("name", WIDER)
def test_an_interval_is_wider_for(name: str) -> None:
    rows, columns = WIDER[name]
    assert measured(rows).half_width > 1.3 * measured(in_turn(columns)).half_width


@settings(max_examples=20, deadline=None)
@given(at=st.integers(0, 7), by=st.floats(3.0, 30.0), machine=st.sampled_from([GPU, CPU]))
def test_one_block_far_off_neither_moves_a_ratio_nor_passes_for_its_process(
    at: int, by: float, machine: Machine
) -> None:
    times = [9.0] * 8
    whole, hit = (
        measured(in_turn({STOCK: [10.0] * 8, BF16: one}, spread=0.01), machine)
        for one in (times, [*times[:at], by * 9.0, *times[at + 1 :]])
    )
    assert hit.value == pytest.approx(whole.value, rel=0.02)


def test_waiting_that_comes_in_each_block_belongs_to_this_machine_and_waiting_in_one_may_pass() -> None:
    """A baseline of many threads waits beside a busy program; a policy of one thread does not."""
    always = measured(in_turn({STOCK: [WAITING] * 3, BF16: [20.0] * 3}, spread=0.05), CPU)
    once = measured(in_turn({STOCK: [WAITING], BF16: [20.0]}, spread=0.05), CPU)
    assert always.low > 2
    assert once.low < 1


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5])
@BOTH
def test_a_policy_far_behind_in_its_only_block_is_not_open(machine: Machine, spread: float) -> None:
    ratio = measured([row(STOCK, 10.0, spread=spread), row(BF16, 76.0, moment_s=2.0, spread=spread)], machine)
    assert ratio.chance_above(1) < 0.05


def test_a_policy_beside_itself_is_as_fast_and_one_without_a_score_has_no_ratio() -> None:
    found = estimated([*in_turn({STOCK: [10.0, 10.5], BF16: [9.0, 9.5]}), row(FP16, Failure(kind="oom", message=""))])
    for ratio in (found.between(BF16, BF16), found.to_baseline(STOCK)):
        assert ratio is not None
        assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)
    assert found.to_baseline(FP16) is found.between(FP16, STOCK) is found.between(BF16, FP16) is None
    assert fit([row(STOCK, 10.0), row(BF16, 9.0)], STOCK, objective_of("energy").score, GPU) is None
    odd = [row(BF16, took(ms), moment_s=90.0) for ms in (math.nan, math.inf)]
    rows = in_turn({STOCK: [10.0] * 3, BF16: [9.0] * 3})
    assert measured([*rows, *odd]) == measured(rows)


def test_a_figure_other_than_time_has_the_spread_that_is_given_and_waiting_changes_no_peak() -> None:
    own = block(10.0, 0.2, mib=1000.0)
    for baseline, widest in ((own, 0.01), (replace(own, contaminated_by=("host-load",), host_delay=0.5), 0.3)):
        rows = in_turn({STOCK: [baseline] * 3, BF16: [block(10.0, 0.2, mib=500.0)] * 3})
        found = fit(rows, STOCK, objective_of("memory").score, GPU, 0.0005)
        ratio = None if found is None else found.between(BF16, STOCK)
        assert ratio is not None
        assert ratio.value == pytest.approx(2.0)
        assert ratio.half_width < widest


@BOTH
def test_the_best_of_many_equal_policies_is_seldom_likely_to_be_better(machine: Machine) -> None:
    """Forty policies with one row each, none of them better: so it is with a tuning that finds nothing."""
    likely = confirmed = without_shrinking = 0
    for seed in range(60):
        table = Drawn(machine, dict.fromkeys(equals(40), 10.0), SPREADS[machine.device], seed=seed)
        table.rounds(1)
        found = estimated(table.rows, machine)
        chances = [ratio.chance_above(1) for p in found.policies if (ratio := found.to_baseline(p)) is not None]
        likely += max(chances) >= LIKELY
        confirmed += max(chances) >= CONFIRMED
        raw = [ratio.chance_above(1) for p in found.policies if (ratio := found.between(p, STOCK)) is not None]
        without_shrinking += max(raw) >= LIKELY
    assert likely <= round(60 * (1 - LIKELY))
    assert confirmed <= 1
    assert without_shrinking > 2 * likely
