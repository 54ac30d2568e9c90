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
    """Of 60 tables, in which each effect is between half and twice as large as expected."""
    held = shrunk_held = 0
    for seed in range(60):
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
    assert min(held, shrunk_held) >= 0.9 * 60


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

COLUMNS = {STOCK: [10.0, 10.4, 9.7, 10.2, 9.8], BF16: [9.1, 8.8, 9.2, 8.9, 9.0]}
NINE = [10.0, 10.02, 9.98] * 3
BY_LAUNCH = [9.0, 9.01, 9.02, 9.1, 9.11, 9.09, 10.1, 10.12, 10.1]
HOT = block(10.5, 0.03, contaminated_by=("hw-thermal",))
WAITING = block(70.0, host_delay=0.5, contaminated_by=("host-load",))
ODD = {STOCK: [block(10.0, 0.03)] * 4, BF16: [block(9.0, 0.03), block(9.1, 0.03), HOT, block(8.9, 0.03)]}
EQUALS = [row(policy, 10 + 0.02 * math.sin(i), moment_s=2.0 * i) for i, policy in enumerate(equals(20))]
EXAMPLES: dict[str, tuple[Machine, list[Row], tuple[float, float, float], int]] = {
    "a trial": (GPU, [row(STOCK, 10.0), row(BF16, 9.0, moment_s=2.0)], (1.0758, 1.1111, 1.1476), 1),
    "steps that wait for the host": (
        GPU,
        [row(STOCK, 10.0, spread=0.1), row(BF16, 9.0, moment_s=2.0, spread=0.1), row(FP16, 9.0, moment_s=4.0)],
        (0.37839, 1.1111, 3.2627),
        1,
    ),
    "blocks of one launch": (CPU, in_turn(COLUMNS, spread=0.06, per_launch=5), (0.6834, 1.1122, 1.8099), 1),
    "launches that differ": (GPU, in_turn({STOCK: NINE, BF16: BY_LAUNCH}, per_launch=3), (0.88201, 1.0647, 1.2852), 3),
    "runs linked by another policy": (
        GPU,
        [*in_turn({STOCK: [800.0], FP16: [780.0]}, run="1"), *in_turn({FP16: [10.0], BF16: [5.0]})],
        (1.9791, 2.0513, 2.1261),
        1,
    ),
    "a disturbed block": (GPU, in_turn(ODD, per_launch=4), (0.9826, 1.1105, 1.255), 1),
    "a baseline that waited for a CPU": (
        CPU,
        in_turn({STOCK: [WAITING] * 3, BF16: [20.0] * 3}),
        (0.25498, 3.5, 48.042),
        3,
    ),
    "one of many that stands out": (GPU, [*EQUALS, row(BF16, 5.0, moment_s=40.0)], (1.9363, 2, 2.0658), 1),
}
# Shrunk towards the other policies; with fewer than two of them there is nothing to shrink towards.
SHRUNK = {
    "steps that wait for the host": (0.43154, 1.0858, 2.7319),
    "runs linked by another policy": (1.9791, 2.0512, 2.126),
    "one of many that stands out": (1.9362, 1.9999, 2.0657),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_ratio_and_its_interval_are_told_from_its_own_rows_and_from_those_of_other_policies(name: str) -> None:
    machine, rows, own, launches = EXAMPLES[name]
    found = estimated(rows, machine)
    for ratio, expected in ((found.between(BF16, STOCK), own), (found.to_baseline(BF16), SHRUNK.get(name, own))):
        assert ratio is not None
        assert (ratio.low, ratio.value, ratio.high) == pytest.approx(expected, rel=2e-4)
        assert ratio.launches == launches


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
