"""Which rows tell most next, by tables of which it is plain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
from measurements import took
from tables import BF16, BF16_LAST, FP16, block, decided, equals, in_turn, row

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Policy
from amptune.search.table.effects import CPU, GPU, Machine
from amptune.search.table.next_rows import MOST_POLICIES, NextRound, launch_s, next_round, round_again
from amptune.search.table.objective import THROUGHPUT, Objective, objective_of
from amptune.search.table.row import Row

# Steps that wait for the host: a row is worth little.
NOISY = 0.03
# Each with one row: two close rivals, and one that is far behind.
TRIALS = [
    row(STOCK, 10.0, spread=NOISY),
    row(BF16, 8.0, moment_s=2.0, spread=NOISY),
    row(FP16, 8.1, moment_s=4.0, spread=NOISY),
    row(BF16_LAST, 20.0, moment_s=6.0, spread=NOISY),
]


def chosen(
    rows: Sequence[Row],
    *,
    machine: Machine = GPU,
    objective: Objective = THROUGHPUT,
    bar: Callable[[Policy], str | None] = lambda _: None,
    beside: Sequence[Policy] = (),
    unseen: Sequence[Policy] = (),
    running: Collection[Policy] = (),
    start_s: float = 10.0,
    judging_s: Callable[[Policy], float] = lambda _: 0.0,
    left_s: float = 1000.0,
    cost_s: Callable[[Policy], float] = lambda _: 2.0,
) -> NextRound | None:
    """The next round where a block of any policy takes 2 s, unless told."""
    return next_round(
        decided(rows, machine, objective, bar),
        bar,
        beside=beside,
        unseen=unseen,
        running=running,
        fresh_s=lambda policies: launch_s(start_s, len(policies)),
        cost_s=cost_s,
        judging_s=judging_s,
        left_s=left_s,
    )


def policies(found: NextRound | None) -> tuple[Policy, ...]:
    assert found is not None
    return found.policies


# --- who takes part ---------------------------------------------------------------------------------------------------


def test_the_baseline_and_the_leader_always_take_part_and_the_baseline_comes_first() -> None:
    assert policies(chosen(TRIALS))[:2] == (STOCK, BF16)


def test_a_simpler_winner_takes_part_beside_the_leader_that_it_is_level_with() -> None:
    rows = in_turn({STOCK: [10.0], BF16_LAST: [5.0], BF16: [5.001]})
    verdict = decided(rows, GPU)
    assert verdict.leader is not None
    assert (verdict.leader.policy, verdict.winner.policy) == (BF16_LAST, BF16)
    assert policies(chosen(rows)) == (STOCK, BF16_LAST, BF16)


def test_a_rival_that_may_be_the_best_takes_part_and_one_far_behind_does_not() -> None:
    assert policies(chosen(TRIALS)) == (STOCK, BF16, FP16)


def test_a_rival_takes_part_only_if_time_is_left_to_judge_it_as_the_leader() -> None:
    def judging_s(policy: Policy) -> float:
        return 50.0 if policy == FP16 else 0.0

    assert policies(chosen(TRIALS, judging_s=judging_s, left_s=100.0)) == (STOCK, BF16, FP16)
    assert policies(chosen(TRIALS, judging_s=judging_s, left_s=60.0)) == (STOCK, BF16)


def test_the_rivals_that_promise_most_come_first() -> None:
    rivals = equals(6)[1:]
    rows = [row(STOCK, 10.0), *(row(p, 8 + 0.05 * i, moment_s=2.0, spread=NOISY) for i, p in enumerate(rivals))]
    assert policies(chosen(rows)) == (STOCK, *rivals)


def test_a_round_is_no_longer_than_a_few_policies() -> None:
    rows = [row(policy, 10 - 0.001 * i, moment_s=2.0 * i, spread=NOISY) for i, policy in enumerate(equals(30))]
    assert len(policies(chosen(rows))) == MOST_POLICIES
    assert len(set(policies(chosen(rows, unseen=[BF16, FP16])))) == MOST_POLICIES


def test_a_rejected_leader_is_replaced() -> None:
    assert policies(chosen(TRIALS, bar=lambda policy: "not as good as FP32" if policy == BF16 else None)) == (
        STOCK,
        FP16,
    )


def test_a_leader_that_failed_is_replaced() -> None:
    failed = row(BF16, Failure(kind="oom", message=""), moment_s=8.0)
    assert policies(chosen([*TRIALS, failed])) == (STOCK, FP16)


def test_a_rival_too_slow_for_the_memory_objective_takes_no_part() -> None:
    rows = in_turn({STOCK: [took(10, 1000)], BF16: [took(9, 600)], FP16: [took(20, 400)], BF16_LAST: [took(9, 600)]})
    assert FP16 not in policies(chosen(rows, objective=objective_of("memory")))


# --- what was not measured yet ----------------------------------------------------------------------------------------


def test_unseen_policies_are_measured_once_no_measured_one_promises_more() -> None:
    settled = in_turn({STOCK: [10.0] * 5, BF16: [5.0] * 5})
    assert chosen(settled) is None
    assert policies(chosen(settled, unseen=[FP16])) == (STOCK, BF16, FP16)
    rivals = [row(STOCK, 10.0), row(BF16, 8.0, spread=0.3), row(FP16, 8.0, moment_s=2.0, spread=0.3)]
    assert policies(chosen(rivals, unseen=[BF16_LAST])) == (STOCK, BF16, FP16)


def test_unseen_policies_wait_until_enough_processes_stand_behind_the_answer() -> None:
    """With 300 s one round of eight took all the time: two of them were not reached, and nothing was confirmed."""
    for launches, expected in ((1, (STOCK, BF16)), (2, (STOCK, BF16, FP16))):
        rows = in_turn({STOCK: [10.0] * 6, BF16: [5.0] * 6}, per_launch=6 // launches)
        assert policies(chosen(rows, unseen=[FP16])) == expected


def test_the_baseline_is_no_unseen_policy_and_is_measured_once_a_round() -> None:
    assert policies(chosen([row(STOCK, 10.0)], unseen=[STOCK, BF16])) == (STOCK, BF16)


def test_a_baseline_that_has_no_rival_is_not_measured_again() -> None:
    assert chosen([row(STOCK, 10.0)]) is None
    assert policies(chosen([row(STOCK, 10.0)], unseen=[BF16])) == (STOCK, BF16)


# --- when it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [GPU, CPU], ids=lambda machine: str(machine.device))
@pytest.mark.parametrize("ms", [5.0, 30.0])
def test_a_decided_comparison_ends_for_or_against_the_leader(ms: float, machine: Machine) -> None:
    assert chosen(in_turn({STOCK: [10.0] * 5, BF16: [ms] * 5}), machine=machine) is None


def test_one_row_decides_nothing_however_large_the_gain_is() -> None:
    assert policies(chosen(in_turn({STOCK: [10.0], BF16: [5.0]}))) == (STOCK, BF16)


@pytest.mark.parametrize(("spread", "ends"), [(0.001, True), (0.3, False)])
def test_for_memory_the_speed_has_to_be_known_too(spread: float, *, ends: bool) -> None:
    columns = {STOCK: [block(10, spread, mib=1000)], BF16: [block(9, spread, mib=500)]}
    rows = in_turn({policy: blocks * (5 if ends else 1) for policy, blocks in columns.items()})
    assert (chosen(rows, objective=objective_of("memory")) is None) is ends


@pytest.mark.parametrize("ms", [9.99, 9.9])
def test_an_open_question_goes_on(ms: float) -> None:
    assert policies(chosen(in_turn({STOCK: [10.0, 10.1], BF16: [ms, ms + 0.1]}))) == (STOCK, BF16)


def test_rivals_that_are_all_much_slower_than_the_baseline_do_not_keep_a_comparison_going() -> None:
    """Which of them is the best is no question: none of them wins."""
    rows = in_turn({STOCK: [10.0] * 5, BF16: [20.0] * 5, FP16: [20.0] * 5, BF16_LAST: [20.0] * 5})
    assert chosen(rows) is None


def test_a_simpler_policy_level_with_the_leader_does_not_keep_a_comparison_going() -> None:
    """It wins already."""
    rows = in_turn({STOCK: [10.0] * 40, BF16_LAST: [5.0] * 40, BF16: [5.002] * 40})
    assert decided(rows, GPU).winner.policy == BF16
    assert chosen(rows) is None


def test_equal_policies_end_a_comparison_once_each_is_well_known() -> None:
    few = in_turn({STOCK: [10.0, 10.1], BF16: [5.0, 5.1], FP16: [5.1, 5.0]}, spread=NOISY)
    many = in_turn({STOCK: [10.0] * 60, BF16: [5.0] * 60, FP16: [5.0] * 60})
    assert set(policies(chosen(few))) == {STOCK, BF16, FP16}
    assert chosen(many) is None


# --- time and processes -----------------------------------------------------------------------------------------------


def test_without_processes_that_run_a_round_is_fresh() -> None:
    assert chosen(TRIALS) == NextRound(policies=(STOCK, BF16, FP16), fresh=True)


@pytest.mark.parametrize(("start_s", "fresh"), [(0.1, True), (1000.0, False)])
def test_processes_are_started_anew_while_that_is_worth_its_time(start_s: float, *, fresh: bool) -> None:
    """A launch shows what blocks of one process do not."""
    rows = in_turn({STOCK: [10.0, 10.1] * 2, BF16: [9.0, 9.1] * 2}, per_launch=2, spread=NOISY)
    found = chosen(rows, running={STOCK, BF16}, start_s=start_s, left_s=5000.0)
    assert found == NextRound(policies=(STOCK, BF16), fresh=fresh)


def test_many_blocks_of_one_launch_ask_for_a_fresh_one() -> None:
    def asks(blocks: int) -> bool:
        times = [10.0, 10.1] * blocks
        rows = in_turn({STOCK: times, BF16: [0.95 * ms for ms in times]}, per_launch=blocks, spread=NOISY)
        found = chosen(rows, running={STOCK, BF16}, start_s=40.0)
        assert found is not None
        return found.fresh

    assert not asks(2)
    assert asks(20)


def test_after_one_launch_the_next_round_is_a_second_one_because_one_confirms_nothing() -> None:
    rows = in_turn({STOCK: [10.0] * 9, BF16: [5.0] * 9}, per_launch=9)
    assert chosen(rows, running={STOCK, BF16}, start_s=40.0) == NextRound(policies=(STOCK, BF16), fresh=True)


def test_the_recipe_is_measured_beside_the_winner_while_there_is_time() -> None:
    rows = in_turn({STOCK: [10.0], FP16: [9.0], BF16_LAST: [5.0]})
    beside = chosen(rows, beside=[FP16])
    assert beside is not None
    assert beside.policies[:3] == (STOCK, BF16_LAST, FP16)
    short = chosen(rows, beside=[FP16], left_s=16.5)
    assert short is not None
    assert FP16 not in short.policies


def test_a_policy_without_a_process_makes_the_round_fresh() -> None:
    found = chosen(TRIALS, running={STOCK, BF16}, start_s=100.0)
    assert found == NextRound(policies=(STOCK, BF16, FP16), fresh=True)


@pytest.mark.parametrize(
    ("left_s", "expected"), [(20.0, (STOCK, BF16, FP16)), (19.9, (STOCK, BF16)), (16.0, (STOCK, BF16))]
)
def test_a_round_that_does_not_fit_leaves_out_the_rivals(left_s: float, expected: tuple[Policy, ...]) -> None:
    """Three processes take 14 s to start beside one another, and a block 2 s."""
    assert policies(chosen(TRIALS, left_s=left_s)) == expected


def test_no_round_is_begun_that_does_not_fit() -> None:
    assert chosen(TRIALS, left_s=15.9) is None
    assert chosen(TRIALS, left_s=1.9, running={STOCK, BF16, FP16}) is None


def test_with_time_for_one_turn_the_loop_sees_the_leader_once() -> None:
    assert policies(chosen(TRIALS, running=(STOCK, BF16), left_s=3.0)) == (BF16,)
    assert chosen(TRIALS, running=(STOCK,), left_s=3.0) is None
    seen = replace(TRIALS[1], outcome=replace(took(5.0), in_loop=True))
    assert chosen([*TRIALS, seen], running=(STOCK, BF16), left_s=3.0) is None


def test_a_budget_without_time_for_a_launch_uses_the_processes_that_run() -> None:
    found = chosen(TRIALS, left_s=5.0, running={STOCK, BF16})
    assert found == NextRound(policies=(STOCK, BF16), fresh=False)


# --- the same policies again ------------------------------------------------------------------------------------------


def again(
    *, fresh: bool = False, running: Collection[Policy] = (STOCK, BF16), start_s: float = 10.0, left_s: float = 1000.0
) -> NextRound | None:
    """Another round of two policies that are known well, where a block takes 2 s."""
    verdict = decided(in_turn({STOCK: [10.0] * 6, BF16: [5.0] * 6}, per_launch=3), GPU)
    return round_again(
        verdict,
        (STOCK, BF16),
        fresh=fresh,
        running=running,
        fresh_s=lambda policies: launch_s(start_s, len(policies)),
        cost_s=lambda _: 2.0,
        left_s=left_s,
    )


def test_policies_that_are_known_are_measured_again_if_that_is_asked_for() -> None:
    assert policies(again()) == (STOCK, BF16)


def test_another_round_is_in_fresh_processes_if_wanted_or_needed_or_if_that_tells_more() -> None:
    costly, cheap = again(start_s=500.0), again(start_s=0.1)
    assert costly is not None
    assert not costly.fresh
    assert cheap is not None
    assert cheap.fresh
    for found in (again(fresh=True, start_s=500.0), again(running=(), start_s=500.0)):
        assert found is not None
        assert found.fresh


def test_another_round_is_in_the_running_processes_if_fresh_ones_do_not_fit() -> None:
    assert again(fresh=True, left_s=10.0) == NextRound(policies=(STOCK, BF16), fresh=False)
    assert again(fresh=True, left_s=3.0) is None
    assert again(running=(), left_s=10.0) is None


def test_if_the_loop_contradicts_trials_and_the_leaders_turn_takes_too_long_another_gets_one() -> None:
    refuted, dear = BF16.compiled("default"), BF16.compiled("reduce-overhead")
    restless = row(refuted, block(90.0, in_loop=True, settled=False))
    rows = [row(STOCK, 10.0), row(refuted, 4.0), row(dear, 5.0), row(FP16, 6.0), restless]
    running = [STOCK, dear, FP16]
    found = chosen(
        rows, running=running, start_s=60.0, left_s=40.0, cost_s=lambda policy: 60.0 if policy == dear else 2.0
    )
    assert found is not None
    assert (found.policies, found.fresh) == ((FP16,), False)
