"""Which rows tell most next, by tables of which it is plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tables import BF16, BF16_LAST, FP16, block, decided, equals, in_turn, row

from amptune.policy.settings import STOCK, Policy
from amptune.search.table.effects import GPU
from amptune.search.table.next_rows import MOST_POLICIES, NextRound, launch_s, next_round
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
SETTLED = in_turn({STOCK: [10.0] * 5, BF16: [5.0] * 5})
ONE_LAUNCH = in_turn({STOCK: [10.0] * 6, BF16: [5.0] * 6}, per_launch=6)
IN_PAIRS = in_turn({STOCK: [10.0, 10.1] * 2, BF16: [9.0, 9.1] * 2}, per_launch=2, spread=NOISY)
LEADER_ALONE, BOTH_RIVALS = (STOCK, BF16), (STOCK, BF16, FP16)


def chosen(rows: Sequence[Row], *, start_s: float = 10.0, **asked: Any) -> NextRound | None:
    """The next round where a block of any policy takes 2 s, unless told."""
    bar = asked.pop("bar", lambda _: None)
    usual: dict[str, Any] = {
        "beside": (),
        "unseen": (),
        "running": (),
        "fresh_s": lambda policies: launch_s(start_s, len(policies)),
        "cost_s": lambda _: 2.0,
        "judging_s": lambda _: 0.0,
        "left_s": 1000.0,
    }
    return next_round(decided(rows, GPU, bar=bar), bar, **{**usual, **asked})


@pytest.mark.parametrize(
    ("rows", "asked", "expected", "fresh"),
    [
        (TRIALS, {}, BOTH_RIVALS, True),  # one far behind takes no part
        (TRIALS, {"bar": lambda policy: "barred" if policy == BF16 else None}, (STOCK, FP16), True),
        # A rival takes part only if time is left to judge it as the leader.
        (TRIALS, {"judging_s": lambda policy: 50.0 * (policy == FP16), "left_s": 60.0}, LEADER_ALONE, True),
        # Policies without a row are measured once no measured one promises more, in enough processes.
        (SETTLED, {}, None, True),
        (SETTLED, {"unseen": [FP16]}, BOTH_RIVALS, True),
        (ONE_LAUNCH, {"unseen": [FP16]}, LEADER_ALONE, True),
        ([row(STOCK, 10.0)], {"unseen": [STOCK, BF16]}, LEADER_ALONE, True),
        # Three processes take 14 s to start beside one another, and a block 2 s.
        (TRIALS, {"left_s": 20.0}, BOTH_RIVALS, True),
        (TRIALS, {"left_s": 19.9}, LEADER_ALONE, True),
        (TRIALS, {"left_s": 15.9}, None, True),
        # Processes are started anew while that is worth its time; without time, those that run are used.
        (IN_PAIRS, {"start_s": 0.1, "running": LEADER_ALONE}, LEADER_ALONE, True),
        (IN_PAIRS, {"start_s": 1000.0, "left_s": 5000.0, "running": LEADER_ALONE}, LEADER_ALONE, False),
        (TRIALS, {"left_s": 5.0, "running": LEADER_ALONE}, LEADER_ALONE, False),
        # With time for one turn, the loop sees the leader once.
        (TRIALS, {"left_s": 3.0, "running": LEADER_ALONE}, (BF16,), False),
        ([*TRIALS, row(BF16, block(8.0, in_loop=True))], {"left_s": 3.0, "running": LEADER_ALONE}, None, False),
        # The recipe is measured beside the winner while there is time.
        (SETTLED[:2], {"beside": [FP16]}, BOTH_RIVALS, True),
        (SETTLED[:2], {"beside": [FP16], "left_s": 16.5}, LEADER_ALONE, True),
    ],
)
def test_the_baseline_the_leader_and_each_rival_that_may_be_best_take_part_while_that_is_worth_its_time(
    rows: Sequence[Row], asked: dict[str, Any], expected: tuple[Policy, ...] | None, *, fresh: bool
) -> None:
    found = chosen(rows, **asked)
    assert (found and (found.policies, found.fresh)) == (expected and (expected, fresh))


def test_a_round_is_no_longer_than_a_few_policies() -> None:
    rows = [row(policy, 10 - 0.001 * i, moment_s=2.0 * i, spread=NOISY) for i, policy in enumerate(equals(30))]
    found = chosen(rows, unseen=(BF16, FP16))
    assert found is not None
    assert len(set(found.policies)) == len(found.policies) == MOST_POLICIES
