"""The model of the table, by tables whose truth is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
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


def estimated(rows: Sequence[Row], machine: Machine = GPU, spread: float | None = None) -> Estimates:
    found = fit(rows, STOCK, THROUGHPUT.score, machine, spread)
    assert found is not None
    return found


def measured(rows: Sequence[Row], machine: Machine = GPU, policy: Policy = BF16, other: Policy = STOCK) -> Ratio:
    """The ratio from the two policies' own rows."""
    ratio = estimated(rows, machine).between(policy, other)
    assert ratio is not None
    return ratio


def to_baseline(rows: Sequence[Row], machine: Machine = GPU, policy: Policy = BF16) -> Ratio:
    ratio = estimated(rows, machine).to_baseline(policy)
    assert ratio is not None
    return ratio


# --- an interval is about a later sitting -----------------------------------------------------------------------------


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("runs", "launches", "rounds", "rivals"),
    [(1, 1, 1, (FP16, BF16_LAST)), (1, 1, 4, ()), (1, 3, 2, ()), (3, 1, 2, ())],
    ids=["single trials", "blocks of one launch", "launches", "runs"],
)
def test_the_interval_holds_what_a_later_sitting_shows_about_as_often_as_it_says(
    machine: Machine, runs: int, launches: int, rounds: int, rivals: tuple[Policy, ...]
) -> None:
    """Of 300 tables, in which each effect is between half and twice as large as expected.

    A single block may be an outlier that nothing shows, so intervals of single trials hold more often.
    """
    held = shrunk_held = 0
    for seed in range(300):
        times_ms = {STOCK: 10.0, BF16: 9.0, **dict.fromkeys(rivals, 9.5)}
        table = Drawn(machine, times_ms, SPREADS[machine.device], seed=seed, wide=2.0)
        for run in range(runs):
            for launch in range(launches):
                table.rounds(rounds, run=f"run {run}", launch=str(launch), start_s=100.0 * launch)
        truth, found = table.later(BF16, STOCK), estimated(table.rows, machine)
        own, shrunk = found.between(BF16, STOCK), found.to_baseline(BF16)
        assert own is not None
        assert shrunk is not None
        held += own.low <= truth <= own.high
        shrunk_held += shrunk.low <= truth <= shrunk.high
    most = 1.0 if runs == launches == rounds == 1 else 0.99
    assert 0.92 <= held / 300 <= most
    assert 0.92 <= shrunk_held / 300 <= most


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("waiting", [STOCK, BF16], ids=["baseline", "policy"])
def test_the_interval_holds_the_truth_too_if_only_one_of_the_two_waits_for_the_host(
    machine: Machine, waiting: Policy
) -> None:
    """What other programs do to the host then hits one of them and spares the other."""
    held = 0
    for seed in range(300):
        spreads = {STOCK: machine.least_spread, BF16: machine.least_spread, waiting: 10 * machine.least_spread}
        table = Drawn(machine, {STOCK: 10.0, BF16: 9.0}, spreads, seed=seed, wide=1.5)
        table.rounds(2)
        ratio = measured(table.rows, machine)
        held += ratio.low <= table.later(BF16, STOCK) <= ratio.high
    assert 0.92 <= held / 300 <= 0.99


def test_a_later_sitting_adds_more_to_two_policies_of_which_one_waits_for_the_host_than_to_two_that_both_do() -> None:
    """For what their steps differ: what a busy host does to both alike cancels."""
    found = estimated([row(STOCK, 10.0), row(BF16, 9.0, spread=0.1), row(FP16, 9.0, spread=0.1)])
    stock, bf16, fp16 = map(found.policies.index, (STOCK, BF16, FP16))
    both, one = found.next_variance(bf16, fp16) / 2, found.next_variance(bf16, stock)
    assert one > 1.2 * both


@BOTH
def test_no_number_of_blocks_makes_the_interval_narrower_than_what_a_later_sitting_adds(machine: Machine) -> None:
    table = Drawn(machine, {STOCK: 10.0, BF16: 9.0}, SPREADS[machine.device])
    table.rounds(40)
    found = estimated(table.rows, machine)
    ratio, (p, b) = found.between(BF16, STOCK), map(found.policies.index, (BF16, STOCK))
    assert ratio is not None
    assert ratio.deviation >= math.sqrt(found.next_variance(p, b)) > 0.5 * SPREADS[machine.device]


@BOTH
def test_steps_that_wait_for_the_host_get_wide_intervals_and_those_of_the_device_narrow_ones(machine: Machine) -> None:
    def width(spread: float) -> float:
        rows = [row(STOCK, 10.0, spread=spread), row(BF16, 9.0, moment_s=2.0, spread=spread)]
        return measured(rows, machine).half_width

    least = machine.least_spread
    assert width(3 * least) > 2.5 * width(least)
    assert width(least / 3) == pytest.approx(width(least)), "a step spread counts as at least the machine's least"


def test_one_policy_that_waits_for_the_host_widens_its_own_interval_alone() -> None:
    rows = [row(STOCK, 10.0), row(BF16, 9.0, moment_s=2.0), row(FP16, 9.0, moment_s=4.0, spread=0.1)]
    assert measured(rows, policy=FP16).half_width > 3 * measured(rows).half_width


def test_a_block_of_few_steps_has_the_spread_of_the_other_policies() -> None:
    short = replace(block(9.0), step_ms=(9.0, 9.0))

    def width(spread: float) -> float:
        rows = [row(STOCK, 10.0, spread=spread), row(FP16, 10.0, spread=spread), row(BF16, short)]
        return measured(rows).half_width

    assert width(0.1) > 3 * width(0.001)


# --- rows are weights -------------------------------------------------------------------------------------------------


def test_a_single_trial_and_many_launches_are_only_different_weights() -> None:
    trials = [row(STOCK, 10.0, launch="search"), row(BF16, 9.5, launch="search", moment_s=2.0)]
    launches = in_turn({STOCK: [10.0, 10.1, 9.9, 10.0], BF16: [9.1, 9.0, 9.0, 8.9]}, start_s=10.0)
    one, many, both = (measured(rows, CPU) for rows in (trials, launches, trials + launches))
    assert one.half_width > many.half_width > 0
    assert one.value < both.value < many.value
    assert both.value - one.value > many.value - both.value, "launches weigh more"


def test_launches_tell_more_than_as_many_blocks_of_one_launch_and_those_more_than_one_row() -> None:
    columns = {STOCK: [10.0, 10.4, 9.7, 10.2, 9.8], BF16: [9.1, 8.8, 9.2, 8.9, 9.0]}
    launches, blocks = (measured(in_turn(columns, per_launch=n, spread=0.06), CPU) for n in (1, 5))
    one = measured(in_turn({STOCK: [10.0], BF16: [9.0]}, spread=0.06), CPU)
    assert launches.deviation < blocks.deviation < one.deviation
    assert (launches.launches, blocks.launches, one.launches) == (5, 1, 1)


def test_a_trial_and_a_turn_of_the_loop_are_in_two_processes_unless_one_was_disturbed() -> None:
    """At 120 s there is time for one launch beside the search; what was timed beside compilers is no second opinion."""
    disturbed = replace(block(9.0), contaminated_by=("host-load",))
    turns = in_turn({policy: [replace(block(ms), in_loop=True)] for policy, ms in {STOCK: 10.0, BF16: 9.0}.items()})
    for trial, processes in ((block(9.0), 2), (disturbed, 1)):
        trials = [row(STOCK, 10.0, launch="search"), row(BF16, trial, launch="search")]
        assert measured([*trials, *turns]).launches == processes
        assert measured(trials).launches == 1


def test_launches_that_differ_make_the_interval_wider_than_blocks_that_differ() -> None:
    """Nine blocks of three launches: the third launch does not show the gain."""
    baseline, slow = [10.0, 10.02, 9.98] * 3, [9.0, 9.01, 9.02, 9.1, 9.11, 9.09, 10.1, 10.12, 10.1]
    mixed = [slow[i] for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
    by_launch = measured(in_turn({STOCK: baseline, BF16: slow}, per_launch=3))
    by_block = measured(in_turn({STOCK: baseline, BF16: mixed}, per_launch=3))
    assert by_launch.deviation > 1.05 * by_block.deviation


def test_the_order_of_the_rows_does_not_matter() -> None:
    table = Drawn(GPU, {STOCK: 10.0, BF16: 9.0, FP16: 9.5}, 0.01)
    table.rounds(4)
    there, back = measured(table.rows), measured(table.rows[::-1])
    assert (there.value, there.low, there.high) == pytest.approx((back.value, back.low, back.high), rel=1e-6)


def test_a_policy_beside_itself_is_as_fast() -> None:
    found = estimated(in_turn({STOCK: [10.0, 10.5], BF16: [9.0, 9.5]}))
    for ratio in (found.between(BF16, BF16), found.to_baseline(STOCK)):
        assert ratio is not None
        assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_a_policy_without_a_score_has_no_ratio() -> None:
    failed = row(FP16, Failure(kind="oom", message=""))
    found = estimated([row(STOCK, 10.0), row(BF16, 9.0), failed])
    assert found.to_baseline(FP16) is found.between(FP16, STOCK) is found.between(BF16, FP16) is None


def test_a_baseline_without_a_score_gives_no_estimates() -> None:
    rows = [row(STOCK, Failure(kind="oom", message="")), row(BF16, 9.0)]
    assert fit(rows, STOCK, THROUGHPUT.score, GPU) is None
    assert fit([row(STOCK, 10.0), row(BF16, 9.0)], STOCK, objective_of("energy").score, GPU) is None


def test_a_figure_other_than_time_has_the_spread_that_is_given() -> None:
    rows = [row(STOCK, took(mib=1000), spread=0.2), row(BF16, took(mib=500), moment_s=2.0, spread=0.2)]
    found = fit(rows, STOCK, objective_of("memory").score, GPU, 0.0005)
    assert found is not None
    ratio = found.between(BF16, STOCK)
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert ratio.half_width < 0.01


def test_policies_measured_long_ago_are_still_estimated() -> None:
    """Effects may be sized by the newest rows alone; the estimates are those of all policies."""
    old = in_turn({STOCK: [10.0, 10.0], FP16: [8.0, 8.0]})
    found = estimated(old + in_turn({STOCK: [10.0] * 160, BF16: [9.0] * 160}, start_s=100.0, per_launch=20))
    assert set(found.policies) == {STOCK, BF16, FP16}
    ratio = found.to_baseline(FP16)
    assert ratio is not None
    assert ratio.value == pytest.approx(1.25, rel=0.01)


# --- drift ------------------------------------------------------------------------------------------------------------

RISE = [math.exp(0.05 * i / 8) for i in range(9)]


@BOTH
@pytest.mark.parametrize("per_launch", [1, 3, 9])
@pytest.mark.parametrize("times", [1.0, -1.0, 4.0])
def test_drift_common_to_all_policies_cancels(machine: Machine, per_launch: int, times: float) -> None:
    """Of 5 % in both directions, and of 20 %."""
    drift = [one**times for one in RISE]
    rows = in_turn({STOCK: [10 * d for d in drift], BF16: [9 * d for d in drift]}, per_launch=per_launch)
    ratio = measured(rows, machine)
    assert ratio.value == pytest.approx(10 / 9, rel=0.015)
    assert ratio.low <= 10 / 9 <= ratio.high


@pytest.mark.parametrize("per_launch", [1, 3, 9])
def test_drift_of_a_few_percent_does_not_hide_a_gain_of_ten(per_launch: int) -> None:
    rows = in_turn({STOCK: [10 * d for d in RISE], BF16: [9 * d for d in RISE]}, per_launch=per_launch)
    assert measured(rows).chance_above(1) >= 0.98


def test_a_policy_is_compared_with_the_baseline_as_it_was_at_the_time() -> None:
    """The baseline slows down by 5 % in ten minutes; one policy is measured at the start, one at the end."""
    rows = [row(STOCK, 10 * math.exp(0.05 * i / 11), launch=str(i), moment_s=53.0 * i) for i in range(12)]
    rows += [row(BF16, 9.0, moment_s=1.0), row(FP16, 9 * math.exp(0.05), moment_s=584.0)]
    rows.sort(key=lambda one: one.moment_s)
    assert measured(rows).value == pytest.approx(10 / 9, rel=0.025)
    assert measured(rows, policy=FP16).value == pytest.approx(10 / 9, rel=0.025)


@BOTH
def test_a_row_close_in_time_to_the_baselines_tells_more(machine: Machine) -> None:
    rows = [row(STOCK, 10.0), row(BF16, 9.0, moment_s=2.0), row(FP16, 9.0, moment_s=590.0)]
    near, far = measured(rows, machine), measured(rows, machine, FP16)
    assert near.deviation < far.deviation


# --- runs -------------------------------------------------------------------------------------------------------------


@BOTH
def test_a_busy_machine_in_a_former_run_makes_no_new_trial_look_faster(machine: Machine) -> None:
    """A resumed study: without a row of the baseline, or of a common policy, two runs are not compared."""
    rows = [row(STOCK, 800.0, run="former"), row(BF16, 10.0), row(FP16, 10.1, moment_s=3.0)]
    for policy in (BF16, FP16):
        found = fit(rows, STOCK, THROUGHPUT.score, machine)
        assert found is not None
        assert found.between(policy, STOCK) is None
        assert found.to_baseline(policy) is None


@BOTH
def test_a_resumed_study_compares_new_trials_with_the_baseline_of_their_own_run(machine: Machine) -> None:
    former = in_turn({STOCK: [800.0, 801.0], FP16: [790.0, 791.0]}, run="former")
    rows = [*former, row(STOCK, 10.0), row(BF16, 10.0, moment_s=2.0)]
    assert measured(rows, machine).value == pytest.approx(1.0, rel=0.05)
    assert measured(rows, machine, FP16).value == pytest.approx(800 / 790, rel=0.05)


@BOTH
def test_what_former_runs_showed_stays_known_however_many_rows_follow(machine: Machine) -> None:
    rows = in_turn({STOCK: [10.0] * 6, BF16: [7.0] * 6}, run="first")
    for number in range(12):
        rows += in_turn({STOCK: [10.0] * 6, **{policy: [12.0] * 6 for policy in equals(4)[1:]}}, run=f"{number}")
    assert len(rows) >= 300
    assert measured(rows, machine).value == pytest.approx(10 / 7, rel=0.05)
    assert measured(rows, machine).low > 1


@BOTH
def test_one_block_among_few_that_is_far_off_does_not_hide_what_the_others_show(machine: Machine) -> None:
    for odd in (1.0, 5.0, 40.0):
        rows = in_turn({STOCK: [10.0, 10.01, 9.99, 10.0], BF16: [5.0, 5.01, odd, 5.0]})
        assert measured(rows, machine).low > 1
        assert measured(rows, machine).value == pytest.approx(2.0, rel=0.1)


def test_a_figure_that_is_no_positive_number_is_left_out() -> None:
    rows = in_turn({STOCK: [10.0] * 3, BF16: [9.0] * 3})
    odd = [row(BF16, took(ms), moment_s=90.0) for ms in (math.nan, math.inf)]
    assert measured([*rows, *odd], GPU).value == pytest.approx(10 / 9, rel=1e-3)


@BOTH
def test_a_policy_that_both_runs_measured_links_them(machine: Machine) -> None:
    rows = [*in_turn({STOCK: [800.0], BF16: [780.0]}, run="former"), *in_turn({BF16: [10.0], FP16: [5.0]})]
    ratio = measured(rows, machine, FP16)
    assert ratio.value == pytest.approx(2 * 800 / 780, rel=0.1)
    assert ratio.half_width > measured(rows, machine).half_width


@BOTH
def test_a_run_on_a_slower_machine_says_the_same(machine: Machine) -> None:
    first, second = ({STOCK: [10.0, 10.1], BF16: [9.0, 9.1]}, {STOCK: [10.1, 10.0], BF16: [9.2, 9.0]})
    slower = {policy: [3 * ms for ms in times] for policy, times in second.items()}
    alike, apart = (measured(in_turn(first, run="1") + in_turn(c, run="2"), machine) for c in (second, slower))
    assert (alike.value, alike.half_width) == pytest.approx((apart.value, apart.half_width), rel=0.01)


def test_two_runs_tell_more_than_one_of_as_many_rows() -> None:
    columns = {STOCK: [10.0, 10.1, 9.9, 10.0], BF16: [9.0, 9.1, 8.9, 9.0]}
    one = measured(in_turn(columns, spread=0.02))
    halves = [{policy: times[i : i + 2] for policy, times in columns.items()} for i in (0, 2)]
    two = measured(in_turn(halves[0], run="1", spread=0.02) + in_turn(halves[1], run="2", spread=0.02))
    assert two.deviation < one.deviation


# --- blocks that are not to be trusted --------------------------------------------------------------------------------


@pytest.mark.parametrize(("per_launch", "rounds"), [(1, 6), (3, 9), (9, 9)])
@pytest.mark.parametrize("times", [1.2, 1.5, 4.0])
def test_an_outlier_does_not_move_the_ratio_or_hide_the_gain(per_launch: int, rounds: int, times: float) -> None:
    noise = [1.0, 1.001, 0.999, 1.0005, 0.9995, 1.001, 1.0, 0.999, 1.0]
    blocks = [9 * (times if i == 1 else 1.0) * noise[-i] for i in range(rounds)]
    rows = in_turn({STOCK: [10 * one for one in noise[:rounds]], BF16: blocks}, per_launch=per_launch)
    ratio = measured(rows)
    assert ratio.value == pytest.approx(10 / 9, rel=0.02)
    assert ratio.chance_above(1) >= LIKELY


def test_a_gain_over_a_baseline_whose_threads_waited_for_a_cpu_is_not_believed() -> None:
    """Beside one busy program a process may take several times as long as another, step for step."""

    def chance(delay: float) -> float:
        beside = block(70.0, contaminated_by=("host-load",), host_delay=delay)
        return to_baseline(in_turn({STOCK: [beside] * 3, BF16: [20.0] * 3}), CPU).chance_above(1.0)

    def chance_of_less_memory() -> float:
        beside = block(10.0, mib=2000.0, contaminated_by=("host-load",), host_delay=0.5)
        found = fit(in_turn({STOCK: [beside] * 3, BF16: [10.0] * 3}), STOCK, objective_of("memory").score, CPU, 0.01)
        ratio = None if found is None else found.to_baseline(BF16)
        assert ratio is not None
        return ratio.chance_above(1.0)

    assert chance_of_less_memory() > CONFIRMED, "waiting changes no peak"
    assert chance(0.5) < LIKELY < CONFIRMED < chance(0.12)


def test_a_disturbed_block_counts_less() -> None:
    def moved(*codes: str) -> float:
        odd = block(10.5, 0.03, contaminated_by=codes)
        blocks = [block(9.0, 0.03), block(9.1, 0.03), odd, block(8.9, 0.03)]
        ratio = measured(in_turn({STOCK: [block(10.0, 0.03)] * 4, BF16: blocks}, per_launch=4))
        return abs(math.log(ratio.value * 0.9))

    assert moved("hw-thermal") < 0.7 * moved()
    assert moved("other-process", "power-cap") == moved("hw-thermal")


@pytest.mark.parametrize("codes", [("power-cap",), ("low-clock",), ("power-cap", "low-clock")])
def test_the_state_that_training_lives_in_is_no_disturbance(codes: tuple[str, ...]) -> None:
    def column(marked: tuple[str, ...]) -> list[Measurement]:
        return [block(ms, contaminated_by=marked) for ms in (9.0, 9.5, 9.1)]

    ratios = [measured(in_turn({STOCK: [10.0] * 3, BF16: column(each)})) for each in (codes, ())]
    assert ratios[0] == ratios[1]


# --- the best of many -------------------------------------------------------------------------------------------------


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


def test_the_best_of_many_is_shrunk_and_one_that_stands_out_is_not() -> None:
    others = equals(20)
    rows = [row(policy, 10 + 0.02 * math.sin(i), moment_s=2.0 * i) for i, policy in enumerate(others)]
    rows.append(row(BF16, 5.0, moment_s=40.0))
    found = estimated(rows)
    best = max(others[1:], key=lambda policy: found.raw[found.policies.index(policy)])
    own, shrunk = found.between(best, STOCK), found.to_baseline(best)
    assert own is not None
    assert shrunk is not None
    assert 1.0 <= shrunk.value < 1 + 0.8 * (own.value - 1)
    assert to_baseline(rows).value == pytest.approx(2.0, rel=0.01)


def test_policies_that_are_measured_well_are_hardly_shrunk() -> None:
    columns = {policy: [10 - 0.5 * i] * 5 for i, policy in enumerate([STOCK, BF16, FP16, BF16_LAST])}
    found = estimated(in_turn(columns))
    for policy, times in columns.items():
        ratio = found.to_baseline(policy)
        assert ratio is not None
        assert ratio.value == pytest.approx(10 / times[0], rel=0.003)


def test_two_policies_have_no_others_to_be_shrunk_towards() -> None:
    rows = in_turn({STOCK: [10.0, 10.1], BF16: [9.0, 9.2]})
    shrunk, own = to_baseline(rows), measured(rows)
    assert (shrunk.value, shrunk.low, shrunk.high) == pytest.approx((own.value, own.low, own.high))


def test_shrinking_makes_no_interval_wider_than_what_was_measured_of_an_equal_policy() -> None:
    table = Drawn(GPU, dict.fromkeys(equals(20), 10.0), 0.01)
    table.rounds(1)
    found = estimated(table.rows)
    pairs = [(found.to_baseline(policy), found.between(policy, STOCK)) for policy in equals(20)[1:]]
    widths = [(shrunk.half_width, own.half_width) for shrunk, own in pairs if shrunk and own]
    assert len(widths) == 19
    assert statistics.median(shrunk / own for shrunk, own in widths) < 1
