from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import took
from tables import BF16, BF16_LAST, block, row

from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Fp32Rule, LossScale, Policy
from amptune.search.table.row import (
    SITTING_S,
    Row,
    are_alike,
    contradicts_trials,
    decisive,
    mean_error,
    settled_in,
    sittings_of,
    step_spread,
    waits_for_data,
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
    clock_event_reasons=4,
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
    sm_clock_mhz=1755,
    temperature_c=71,
    host_delay=0.125,
)
RULED = Policy(autocast="fp16", fp32_modules=(Fp32Rule(path="head"),), loss_scale=LossScale(init=1024.0), batch_size=8)

outcomes: st.SearchStrategy[Outcome] = st.sampled_from(
    [
        FULL,
        took(),
        Failure(kind="error", message="bad", where="train.py:3", exception="ValueError"),
        Failure(kind="oom", message=""),
    ]
)
rows = st.builds(
    Row,
    policy=st.sampled_from([STOCK, BF16, BF16_LAST, RULED]),
    outcome=outcomes,
    run=st.text(),
    launch=st.text(),
    moment_s=st.integers(0, 10**10).map(lambda ms: round(ms / 1000, 3)),
)


@given(rows)
def test_a_row_survives_being_written_and_read(one: Row) -> None:
    assert Row.from_dict(json.loads(json.dumps(one.as_dict()))) == one


def test_the_measurement_written_above_has_no_field_left_at_its_default() -> None:
    """So that a new field is written and read too."""
    plain = took()
    same = {one.name for one in fields(FULL) if getattr(FULL, one.name) == getattr(plain, one.name)}
    assert same <= {"samples_per_step", "warmup_steps"}, "these have no default"


@pytest.mark.parametrize("name", ["policy", "outcome", "run", "launch", "moment_s"])
def test_a_row_that_lacks_something_is_refused(name: str) -> None:
    data = row(BF16, 10.0).as_dict()
    del data[name]
    with pytest.raises(KeyError, match=name):
        Row.from_dict(data)


@pytest.mark.parametrize(
    "wrong", [{"moment_s": "soon"}, {"policy": {"autocast": "bf15"}}, {"outcome": {"failed": True, "kind": "bored"}}]
)
def test_a_row_with_a_field_of_another_amptune_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"soon|bf15|kind"):
        Row.from_dict({**row(BF16, 10.0).as_dict(), **wrong})


def test_rows_of_one_run_within_ten_minutes_are_one_sitting_wherever_the_clock_stands() -> None:
    moments_s = (2.8 * SITTING_S, 0.7 * SITTING_S, 1.6 * SITTING_S, 3.9 * SITTING_S)
    second, early, late, third = sittings_of([row(STOCK, 10.0, moment_s=at_s) for at_s in moments_s])
    assert early == late != second != third
    assert sittings_of([row(STOCK, 10.0), row(STOCK, 10.0, run="another")]) == [("run", 0), ("another", 0)]


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.03, 0.2])
@pytest.mark.parametrize("step_ms", [0.1, 2000.0])
def test_the_step_spread_is_a_share_of_the_step_time(step_ms: float, spread: float) -> None:
    assert step_spread(block(step_ms, spread)) == pytest.approx(spread, rel=1e-6, abs=1e-12)


def test_one_slow_step_does_not_widen_the_step_spread_but_makes_the_mean_doubtful() -> None:
    steps = (10.0, 10.1, 9.9, 10.05, 9.95)
    calm, hit = (replace(took(), step_ms=each) for each in (steps, (*steps[:-1], 90.0)))
    assert step_spread(hit) <= 2 * step_spread(calm)  # type: ignore[operator]  # both have steps enough
    assert mean_error(hit) > 0.5
    assert mean_error(replace(took(), step_ms=(*20 * steps, 20.0))) < 0.02
    assert mean_error(replace(took(), step_ms=(10.0,))) == 0.0


# --- which rows decide ------------------------------------------------------------------------------------------------


def in_loop(policy: Policy, step_ms: float, wait_share: float = 0.0) -> Row:
    return row(policy, replace(block(step_ms), in_loop=True, wait_share=wait_share))


def test_a_loop_that_waits_for_its_data_does_not_tell_how_fast_a_step_is() -> None:
    steps, loops = [row(STOCK, 10.0), row(BF16, 5.0)], [in_loop(STOCK, 10.0), in_loop(BF16, 9.0, wait_share=0.5)]
    assert waits_for_data([*steps, *loops])
    assert decisive([*steps, *loops]) == steps
    patient = [in_loop(STOCK, 10.0), in_loop(BF16, 5.2, wait_share=0.05)]
    assert not waits_for_data([*steps, *patient])
    assert decisive([*steps, *patient]) == [*steps, *patient]


def test_unsettled_blocks_count_only_for_a_policy_that_has_no_others() -> None:
    unsettled = [row(one, replace(block(5.0), settled=False)) for one in (BF16, BF16_LAST)]
    settled = row(BF16, 6.0)
    assert decisive([*unsettled, settled]) == [unsettled[1], settled]


def test_a_policy_under_which_graphs_keep_coming_in_the_loop_is_not_settled_whatever_its_trial_says() -> None:
    compiled, other = BF16.compiled("default"), BF16.compiled("reduce-overhead")
    trials = [row(policy, 5.0) for policy in (STOCK, BF16, compiled, other)]
    turn = in_loop(compiled, 9.0)
    restless = replace(turn, outcome=replace(block(90.0), in_loop=True, settled=False))
    assert settled_in([*trials, restless]) == {STOCK, BF16, other}
    assert restless in decisive([*trials, restless])
    assert settled_in([*trials, restless, turn]) == {STOCK, BF16, compiled, other}


def test_graphs_that_keep_coming_in_the_loop_contradict_trials_unless_the_trial_showed_them() -> None:
    trials = [row(policy, 5.0) for policy in (STOCK, BF16)]
    restless = row(BF16_LAST, replace(block(90.0), in_loop=True, settled=False))
    assert not contradicts_trials([*trials, restless], STOCK)
    assert contradicts_trials([*trials, row(BF16_LAST, 4.0), restless], STOCK)
    assert not contradicts_trials([*trials, row(BF16_LAST, 4.0), restless, in_loop(BF16_LAST, 4.1)], STOCK)
    beside = replace(restless, outcome=block(90.0, in_loop=True, settled=False, contaminated_by=("compiling",)))
    assert beside.is_disturbed
    assert contradicts_trials([*trials, row(BF16_LAST, 4.0), beside], STOCK), "what runs beside makes no graphs come"


def test_the_loop_contradicts_a_trial_if_what_was_ahead_is_clearly_behind_there() -> None:
    trials = [row(STOCK, 10.0), row(BF16, 7.0)]
    assert not contradicts_trials([*trials, in_loop(STOCK, 12.0), in_loop(BF16, 11.0)], STOCK), "a smaller gain"
    assert not contradicts_trials([*trials, in_loop(STOCK, 12.0), in_loop(BF16, 12.5)], STOCK), "about level"
    assert contradicts_trials([*trials, in_loop(STOCK, 12.0), in_loop(BF16, 17.0)], STOCK)
    assert not contradicts_trials([*trials, in_loop(BF16, 17.0)], STOCK), "the baseline had no turn"
    assert not contradicts_trials([*trials, in_loop(STOCK, 12.0), in_loop(BF16, 17.0, wait_share=0.5)], STOCK)
    behind = [row(STOCK, 10.0), row(BF16, 11.0), in_loop(STOCK, 12.0), in_loop(BF16, 17.0)]
    assert not contradicts_trials(behind, STOCK), "the trial had said so"
    disturbed = row(BF16, block(17.0, contaminated_by=("foreign-process",), in_loop=True))
    assert not contradicts_trials([*trials, in_loop(STOCK, 12.0), disturbed], STOCK)


def test_speeds_of_a_contradiction_are_compared_within_a_run() -> None:
    """Another program halves the speed in the second run, of the baseline too."""
    runs = [(run, factor, looped) for run, factor in (("1", 1.0), ("2", 2.0)) for looped in (False, True)]
    rows = [
        row(policy, block(ms * factor, in_loop=looped), run=run)
        for run, factor, looped in runs
        for policy, ms in ((STOCK, 10.0), (BF16, 7.0))
        if (run, policy) != ("1", BF16) or not looped
    ]
    assert not contradicts_trials(rows, STOCK)


def test_steps_are_alike_if_they_take_about_the_same_multiple_of_the_baselines() -> None:
    modes = (10.0, 20.0, 40.0) * 10
    baseline = [row(STOCK, replace(took(), step_ms=modes))]
    assert are_alike([row(BF16, replace(took(), step_ms=tuple(ms / 2 for ms in modes)))], baseline)
    now_and_then = tuple(ms / 2 if n % 10 else 30 * ms for n, ms in enumerate(modes))
    assert not are_alike([row(BF16, replace(took(), step_ms=now_and_then))], baseline)
    assert not are_alike([row(BF16, replace(took(), step_ms=modes[:2]))], baseline)


def test_few_steps_do_not_show_how_much_steps_differ() -> None:
    assert step_spread(replace(took(), step_ms=(10.0, 10.5, 9.0, 11.0))) is None
