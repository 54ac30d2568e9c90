from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import took
from tables import BF16, block, row

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import STOCK, Fp32Rule, LossScale, Policy
from amptune.search.table.row import (
    Row,
    decisive,
    graphs_keep_coming,
    mean_error,
    settled_in,
    step_spread,
)

FULL = Measurement(
    samples_per_step=32,
    devices=2,
    step_ms=(1.5, 2.5, 3.5),
    warmup_s=0.25,
    warmup_steps=8,
    peak_allocated_mib=1000.5,
    peak_reserved_mib=1001.5,
    losses=(2.5, 2.25),
    gradient_norm=3.5,
    skipped_share=0.25,
    alloc_retries=2,
    energy_j_per_sample=0.5,
    abandoned=True,
    steady=False,
    discarded=("hw-thermal+other-process",),
    contaminated_by=("power-cap",),
    startup_s=12.5,
    graph_breaks=("print",),
    recompiled=3,
    settled=False,
    in_loop=True,
    wait_share=0.25,
    host_delay=0.125,
)
RULED = Policy(autocast="fp16", fp32_modules=(Fp32Rule(path="head"),), loss_scale=LossScale(init=1024.0), batch_size=8)

rows = st.builds(
    Row,
    policy=st.sampled_from([STOCK, BF16, RULED]),
    outcome=st.sampled_from(
        [FULL, took(), Failure(kind="error", message="bad", where="train.py:3", exception="ValueError")]
    ),
    run=st.text(),
    launch=st.text(),
    moment_s=st.integers(0, 10**10).map(lambda ms: round(ms / 1000, 3)),
)


@given(rows)
def test_a_row_survives_being_written_and_read(one: Row) -> None:
    """A new field too: none above is left at its default but the two that have none."""
    data = one.as_dict()
    assert Row.from_dict(json.loads(json.dumps(data))) == one
    for name in data:
        with pytest.raises(KeyError, match=name):
            Row.from_dict({key: value for key, value in data.items() if key != name})
    same = {one.name for one in fields(FULL) if getattr(FULL, one.name) == getattr(took(), one.name)}
    assert same <= {"samples_per_step", "warmup_steps"}


@given(st.floats(0.1, 2000), st.floats(0, 0.3))
def test_the_step_spread_is_a_share_of_the_step_time_and_few_steps_have_none(step_ms: float, spread: float) -> None:
    assert step_spread(block(step_ms, spread)) == pytest.approx(spread, rel=1e-6, abs=1e-12)
    assert step_spread(replace(took(), step_ms=(10.0, 10.5, 9.0, 11.0))) is None


def test_one_slow_step_does_not_widen_the_step_spread_but_makes_the_mean_doubtful() -> None:
    steps = (10.0, 10.1, 9.9, 10.05, 9.95)
    calm, hit = (replace(took(), step_ms=each) for each in (steps, (*steps[:-1], 90.0)))
    assert (step_spread(hit) or 1.0) <= 2 * (step_spread(calm) or 0.0)
    assert mean_error(hit) > 0.5
    assert mean_error(replace(took(), step_ms=(*20 * steps, 20.0))) < 0.02
    assert mean_error(replace(took(), step_ms=(10.0,))) == 0.0


def in_loop(policy: Policy, step_ms: float, **more: Any) -> Row:
    return row(policy, block(step_ms, in_loop=True, **more))


TRIALS = (row(STOCK, 10.0), row(BF16, 7.0))
RESTLESS = in_loop(BF16, 90.0, settled=False)


@pytest.mark.parametrize(
    ("rows", "keep_coming"),
    [
        ([*TRIALS, in_loop(BF16, 17.0)], False),
        ([*TRIALS, RESTLESS], True),
        ([*TRIALS, RESTLESS, in_loop(BF16, 7.1)], False),  # they came to an end
        ([TRIALS[0], row(BF16, block(7.0, settled=False)), RESTLESS], False),  # the trial had said so
        ([TRIALS[0], row(BF16, block(7.0, abandoned=True)), RESTLESS], False),
    ],
)
def test_graphs_keep_coming_where_the_loop_shows_what_a_settled_trial_did_not(
    rows: list[Row], *, keep_coming: bool
) -> None:
    assert graphs_keep_coming(rows) is keep_coming


def test_a_trial_that_ended_early_tells_neither_how_fast_a_policy_is_nor_that_it_settles() -> None:
    bound, whole = (row(BF16, block(40.0, abandoned=early)) for early in (True, False))
    assert decisive([*TRIALS, bound]) == list(TRIALS)
    assert decisive([bound, whole]) == [whole]
    assert settled_in([bound]) == set()
