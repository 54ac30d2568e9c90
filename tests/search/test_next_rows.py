"""Which rows tell most next, by tables of which it is plain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from tables import BF16, BF16_LAST, FP16, block, decided, equals, in_turn, row

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Policy
from amptune.search.table.effects import CPU, GPU, Machine
from amptune.search.table.next_rows import NextRound, launch_s, next_round
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


def told(found: NextRound | None) -> tuple[tuple[Policy, ...], bool] | None:
    return None if found is None else (found.policies, found.fresh)


# --- who takes part ---------------------------------------------------------------------------------------------------

RIVALS = equals(6)[1:]
SIMPLER = in_turn({STOCK: [10.0], BF16_LAST: [5.0], BF16: [5.001]})
SETTLED = in_turn({STOCK: [10.0] * 5, BF16: [5.0] * 5})
ONE_LAUNCH = in_turn({STOCK: [10.0] * 6, BF16: [5.0] * 6}, per_launch=6)
OPEN_RIVALS = [row(STOCK, 10.0), row(BF16, 8.0, spread=0.3), row(FP16, 8.0, moment_s=2.0, spread=0.3)]
TOO_SLOW = in_turn({STOCK: [block(10, mib=1000)], BF16: [block(9, mib=600)], FP16: [block(20, mib=400)]})
FAILED = row(BF16, Failure(kind="oom", message=""), moment_s=8.0)
BEHIND = {BF16: [20.0] * 5, FP16: [20.0] * 5, BF16_LAST: [20.0] * 5}
LEVEL = in_turn({STOCK: [10.0] * 40, BF16_LAST: [5.0] * 40, BF16: [5.002] * 40})
EQUAL = {STOCK: [10.0, 10.1], BF16: [5.0, 5.1], FP16: [5.1, 5.0]}
LEADER_ALONE, BOTH_RIVALS = (STOCK, BF16), (STOCK, BF16, FP16)


def judged(left_s: float) -> dict[str, Any]:
    return {"judging_s": lambda policy: 50.0 if policy == FP16 else 0.0, "left_s": left_s}


@pytest.mark.parametrize(
    ("rows", "asked", "expected"),
    [
        (TRIALS, {}, BOTH_RIVALS),  # one far behind takes no part
        (SIMPLER, {}, (STOCK, BF16_LAST, BF16)),  # the leader, and the simpler winner that is level with it
        (TRIALS, {"bar": lambda policy: "not as good as FP32" if policy == BF16 else None}, (STOCK, FP16)),
        ([*TRIALS, FAILED], {}, (STOCK, FP16)),
        (TOO_SLOW, {"objective": objective_of("memory")}, LEADER_ALONE),
        # A rival takes part only if time is left to judge it as the leader.
        (TRIALS, judged(100.0), BOTH_RIVALS),
        (TRIALS, judged(60.0), LEADER_ALONE),
        # The rivals that promise most come first.
        (
            [row(STOCK, 10.0), *(row(p, 8 + 0.05 * i, moment_s=2.0, spread=NOISY) for i, p in enumerate(RIVALS))],
            {},
            (STOCK, *RIVALS),
        ),
        # Policies without a row are measured once no measured one promises more, in enough processes.
        (SETTLED, {}, None),
        (SETTLED, {"unseen": [FP16]}, BOTH_RIVALS),
        (OPEN_RIVALS, {"unseen": [BF16_LAST]}, BOTH_RIVALS),
        (ONE_LAUNCH, {"unseen": [FP16]}, LEADER_ALONE),
        ([row(STOCK, 10.0)], {"unseen": [STOCK, BF16]}, LEADER_ALONE),
        ([row(STOCK, 10.0)], {}, None),
        # A comparison ends for or against the leader, on each machine; one row decides nothing.
        (SETTLED, {"machine": CPU}, None),
        (in_turn({STOCK: [10.0] * 5, BF16: [30.0] * 5}), {}, None),
        (in_turn({STOCK: [10.0], BF16: [5.0]}), {}, LEADER_ALONE),
        *((in_turn({STOCK: [10.0, 10.1], BF16: [ms, ms + 0.1]}), {}, LEADER_ALONE) for ms in (9.9, 9.99)),
        # Which of the slower ones is best is no question, nor whether a simpler policy that wins already is level.
        (in_turn({STOCK: [10.0] * 5, **BEHIND}), {}, None),
        (LEVEL, {}, None),
        (in_turn(EQUAL, spread=NOISY), {}, (STOCK, FP16, BF16)),
        (in_turn({STOCK: [10.0] * 60, BF16: [5.0] * 60, FP16: [5.0] * 60}), {}, None),
        # Three processes take 14 s to start beside one another, and a block 2 s.
        (TRIALS, {"left_s": 20.0}, BOTH_RIVALS),
        (TRIALS, {"left_s": 19.9}, LEADER_ALONE),
        (TRIALS, {"left_s": 16.0}, LEADER_ALONE),
        (TRIALS, {"left_s": 15.9}, None),
        (TRIALS, {"left_s": 1.9, "running": BOTH_RIVALS}, None),
    ],
)
def test_the_baseline_the_leader_and_each_rival_that_may_be_best_take_part_while_that_is_worth_its_time(
    rows: Sequence[Row], asked: dict[str, Any], expected: tuple[Policy, ...] | None
) -> None:
    assert told(chosen(rows, **asked)) == (None if expected is None else (expected, True))


# --- time and processes -----------------------------------------------------------------------------------------------

MANY_IN_ONE = {blocks: [10.0, 10.1] * blocks for blocks in (2, 20)}
IN_PAIRS = in_turn({STOCK: [10.0, 10.1] * 2, BF16: [9.0, 9.1] * 2}, per_launch=2, spread=NOISY)


@pytest.mark.parametrize(
    ("rows", "asked", "expected", "fresh"),
    [
        # Processes are started anew while that is worth its time: a launch shows what blocks of one process do not.
        (IN_PAIRS, {"start_s": 0.1, "left_s": 5000.0}, LEADER_ALONE, True),
        (IN_PAIRS, {"start_s": 1000.0, "left_s": 5000.0}, LEADER_ALONE, False),
        *(
            (
                in_turn({STOCK: of, BF16: [0.95 * ms for ms in of]}, per_launch=blocks, spread=NOISY),
                {"start_s": 40.0},
                LEADER_ALONE,
                blocks == 20,
            )
            for blocks, of in MANY_IN_ONE.items()
        ),
        # One launch confirms nothing.
        (ONE_LAUNCH, {"start_s": 40.0}, LEADER_ALONE, True),
        # A policy without a process makes the round fresh; without time for a launch, those that run are used.
        (TRIALS, {"start_s": 100.0}, BOTH_RIVALS, True),
        (TRIALS, {"left_s": 5.0}, LEADER_ALONE, False),
        # With time for one turn, the loop sees the leader once.
        (TRIALS, {"left_s": 3.0}, (BF16,), False),
        (TRIALS, {"left_s": 3.0, "running": (STOCK,)}, None, False),
        ([*TRIALS, row(BF16, block(8.0, in_loop=True))], {"left_s": 3.0}, None, False),
    ],
)
def test_a_round_is_in_fresh_processes_if_these_tell_more_and_fit(
    rows: Sequence[Row], asked: dict[str, Any], expected: tuple[Policy, ...] | None, *, fresh: bool
) -> None:
    found = chosen(rows, **{"running": {STOCK, BF16}, **asked})
    assert told(found) == (None if expected is None else (expected, fresh))


def test_if_the_loop_contradicts_trials_and_the_leaders_turn_takes_too_long_another_gets_one() -> None:
    refuted, dear = BF16.compiled("default"), BF16.compiled("reduce-overhead")
    restless = row(refuted, block(90.0, in_loop=True, settled=False))
    rows = [row(STOCK, 10.0), row(refuted, 4.0), row(dear, 5.0), row(FP16, 6.0), restless]
    found = chosen(
        rows,
        running=[STOCK, dear, FP16],
        start_s=60.0,
        left_s=40.0,
        cost_s=lambda policy: 60.0 if policy == dear else 2.0,
    )
    assert told(found) == ((FP16,), False)
