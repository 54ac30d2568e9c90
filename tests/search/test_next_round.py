"""The round that is measured next, by a verdict alone: nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from random import Random
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import BF16, BF16_LAST, FP16, Drawn, block, decided, equals, in_turn, row

from amptune.policy.settings import STOCK, Policy
from amptune.search.table.effects import CPU, GPU
from amptune.search.table.improvement import expected_improvement
from amptune.search.table.next_rows import NextRound, next_round
from amptune.search.table.row import Row

# A turn and a start take so many seconds.
TURN_S, START_S = 1.0, 5.0
NO_BAR: Callable[[Policy], str | None] = lambda _: None  # noqa: E731  # as `verdict_of` takes it


def seconds(policies: Sequence[Policy], fresh: bool) -> float:  # as `next_round` calls it
    return TURN_S * len(policies) + START_S * fresh


def chosen(
    rows: Sequence[Row],
    *,
    left_s: float = 100.0,
    running: Collection[Policy] = (),
    beside: Sequence[Policy] = (),
    bar: Callable[[Policy], str | None] = NO_BAR,
) -> NextRound | None:
    verdict = decided(rows, GPU, bar=bar)
    return next_round(verdict, bar, beside=beside, running=running, seconds=seconds, left_s=left_s)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(2, 14),
    rounds=st.integers(1, 2),
    left_s=st.floats(0.0, 30.0),
    machine=st.sampled_from([GPU, CPU]),
    running=st.booleans(),
)
def test_a_round_has_the_baseline_and_the_leader_fits_and_leaves_out_who_cannot_win(
    *, seed: int, count: int, rounds: int, left_s: float, machine: object, running: bool
) -> None:
    random, policies = Random(seed), equals(count)
    table = Drawn(machine, {policy: random.uniform(8, 12) for policy in policies}, 0.01, seed=seed)  # type: ignore[arg-type]
    table.rounds(rounds)
    barred = {policy for policy in policies[1:] if random.random() < 0.3}

    def bar(policy: Policy) -> str | None:
        return "not as good as FP32" if policy in barred else None

    verdict = decided(table.rows, machine, bar=bar)  # type: ignore[arg-type]
    run = policies if running else []
    found = next_round(verdict, bar, beside=policies[-1:], running=run, seconds=seconds, left_s=left_s)
    if found is None:
        return
    assert verdict.leader is not None
    alone = found.policies == (verdict.leader.policy,)
    assert alone or {STOCK, verdict.leader.policy} <= set(found.policies)
    assert alone or found.policies[:2] == (STOCK, verdict.leader.policy)
    assert len(set(found.policies)) == len(found.policies) <= 8
    assert not barred & {*found.policies} - {policies[-1]}
    assert seconds(found.policies, found.fresh) <= left_s
    assert found.fresh or set(found.policies) <= set(run)


TRIALS = [row(STOCK, 10.0), row(BF16, 5.0, moment_s=2.0), row(FP16, 5.02, moment_s=4.0)]


def test_what_may_still_win_takes_part_the_likeliest_first_and_what_is_far_behind_does_not() -> None:
    far, beside = replace(BF16_LAST, threads=1), replace(STOCK, batch_size=7)
    rows = [*TRIALS, row(BF16_LAST, 5.06, moment_s=6.0), row(far, 76.0, spread=0.5, moment_s=8.0)]
    assert chosen(rows) == NextRound(policies=(STOCK, BF16, FP16, BF16_LAST), fresh=True)
    assert chosen(rows, left_s=8.5) == NextRound(policies=(STOCK, BF16, FP16), fresh=True)
    with_one = chosen([*rows, row(beside, 10.0)], beside=[beside])
    assert with_one is not None
    assert with_one.policies == (STOCK, BF16, beside, FP16, BF16_LAST)
    early = chosen([*TRIALS, row(BF16_LAST, block(4.0, abandoned=True))])
    assert early is not None
    assert BF16_LAST not in early.policies


@pytest.mark.parametrize(
    ("left_s", "running", "policies", "fresh"),
    [
        (14.5, (STOCK, BF16), (STOCK, BF16, FP16), True),
        (13.5, (STOCK, BF16), (STOCK, BF16), False),
        (6.5, (STOCK, BF16), (STOCK, BF16), False),
        (1.5, (STOCK, BF16), (BF16,), False),
        (6.5, (BF16,), (BF16,), False),
        (6.5, (), None, None),
        (0.5, (STOCK, BF16), None, None),
    ],
)
def test_with_little_time_baseline_and_leader_take_turns_where_they_run_and_at_last_the_leader_alone(
    left_s: float, running: Collection[Policy], policies: tuple[Policy, ...] | None, *, fresh: bool | None
) -> None:
    found = chosen(TRIALS, left_s=left_s, running=running)
    assert (None if found is None else (found.policies, found.fresh)) == (policies and (policies, fresh))


def test_rounds_end_once_the_leader_is_confirmed_in_two_processes_or_nothing_is_near() -> None:
    rounds = in_turn({STOCK: [10.0] * 3, BF16: [5.0] * 3})
    assert chosen(rounds[:2]) is not None
    assert chosen(rounds) is None
    assert chosen(in_turn({STOCK: [10.0] * 2, BF16: [30.0] * 2})) is None
    assert chosen([row(STOCK, 10.0)]) is None


def test_further_turns_come_in_fresh_processes_if_processes_differ_and_else_where_they_run() -> None:
    running = (STOCK, BF16)
    by_process = {STOCK: [10.0] * 8, BF16: [9.0] * 4 + [10.2] * 4}
    by_block = {STOCK: [10.0, 10.6, 9.5, 10.1] * 2, BF16: [9.0, 10.4, 9.4, 10.3] * 2}
    for columns, fresh in ((by_process, True), (by_block, False)):
        found = chosen(in_turn(columns, per_launch=4), running=running)
        assert found is not None
        assert found.fresh is fresh


QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 2000) for i in range(2000)])


@given(ahead=st.lists(st.floats(-3, 3), min_size=1, max_size=5), deviation=st.floats(0, 2))
def test_the_expected_improvement_is_the_mean_of_drawn_ones(ahead: list[float], deviation: float) -> None:
    points = np.array(ahead)
    found = expected_improvement(points, deviation)
    drawn = np.maximum(0.0, points[:, None] + deviation * QUANTILES).mean(axis=1)
    assert found == pytest.approx(drawn, abs=4e-3)
    assert np.all(found >= np.maximum(0.0, points) - 1e-12)
    assert float(expected_improvement(ahead[0], deviation)) == pytest.approx(found[0])
