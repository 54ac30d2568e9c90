"""What comes next: tests give a state and read a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measurements import took
from states import job_after, prepared, state_of, trial_of

from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.durations import Durations
from amptune.search.gate.judgement import judged
from amptune.search.gate.judgements import Judgements
from amptune.search.job import Answer
from amptune.search.next_job import _plain_loop, next_job
from amptune.search.state import Graphs, State
from amptune.search.table.row import Row

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
FAST = Policy(autocast="bf16", memory_format="channels_last", fused_optimizer=True)
GRAPHED, OF_STEP = FAST.compiled("reduce-overhead"), FAST.compiled("step")
CANNOT_RECORD = Failure(kind="unsupported", message="random numbers come from the host")


def sound(*policies: Policy) -> Judgements:
    return Judgements(STOCK).also(*(judged(policy, Parity()) for policy in policies))


def without_graphs(state: State) -> State:
    return state.but(graphs=Graphs())


def test_the_likeliest_winner_compiles_before_anything_is_measured() -> None:
    first = job_after(state_of())
    assert (first.kind, first.policies) == ("compile", (GRAPHED,))
    both = job_after(state_of(graphs_at_once=2).but(graphs=Graphs(at_once=2, begun={GRAPHED: 0.0})))
    assert (both.kind, both.policies) == ("compile", (OF_STEP,))


def test_the_baseline_is_the_first_trial_and_once_a_run() -> None:
    begun = Graphs(at_once=1, begun={GRAPHED: 100.0})
    assert job_after(state_of(graphs=begun)).policies == (STOCK,)
    former = state_of(
        [trial_of(STOCK, 10.0, run="a former run"), trial_of(BF16, 5.0, 1, run="a former run")], graphs=begun
    )
    assert job_after(former).policies == (STOCK,)


def test_both_graphs_of_the_leading_precision_come_before_those_of_another() -> None:
    measured = {STOCK: 10.0, FAST: 6.0, replace(FAST, autocast="fp16"): 5.0, Policy(compile="default"): 9.0}
    state, order = state_of(measured), list[Policy]()
    while (job := next_job(state)) and not isinstance(job, Answer) and job.kind == "compile" and len(order) < 4:
        order += job.policies
        state = state.but(graphs=Graphs(at_once=len(order) + 1, begun=dict.fromkeys(order, 100.0)))
    assert [(one.autocast, one.compile) for one in order] == [
        ("fp16", "reduce-overhead"), ("fp16", "step"), ("bf16", "reduce-overhead"), ("bf16", "step"),
    ]  # fmt: skip


def test_what_cannot_be_recorded_gives_its_place_to_what_needs_no_recording() -> None:
    refused: dict[Policy, float | Failure] = {
        STOCK: 10.0,
        replace(FAST, cuda_graphs=True): CANNOT_RECORD,
        GRAPHED: CANNOT_RECORD,
        FAST: 5.0,
    }
    job = job_after(state_of(refused))
    assert (job.kind, job.policies) == ("compile", (OF_STEP,))
    job = job_after(state_of({**refused, replace(FAST, cuda_graphs="step"): CANNOT_RECORD}))
    assert (job.kind, job.policies) == ("compile", (replace(OF_STEP, cuda_graphs=False),))


def test_recorded_passes_are_not_tried_where_the_whole_step_was_but_what_the_plain_loop_gets_is_told() -> None:
    whole, passes = (replace(FAST, cuda_graphs=recorded) for recorded in ("step", True))
    measured: dict[Policy, float | Failure] = {STOCK: 12.0, whole: 3.0}
    while (job := job_after(without_graphs(state_of(measured)))).kind == "trial":
        measured.update((policy, 10.0) for policy in job.policies)
    assert len(measured) > 3
    assert passes not in measured
    state = without_graphs(state_of(measured))
    told = _plain_loop(state, Durations(state))
    assert told is not None
    assert told.policies == (passes,)
    measured[passes] = 4.0
    known = state_of(measured)
    assert _plain_loop(known, Durations(known)) is None
    failed: dict[Policy, float | Failure] = {STOCK: 12.0, whole: CANNOT_RECORD, FAST: 6.0}
    refused = without_graphs(state_of(failed))
    assert passes in {*job_after(refused).policies, *refused.candidates.starts}


def test_a_graph_that_would_come_too_late_is_not_begun() -> None:
    assert job_after(state_of(left_s=9.0)).kind == "trial"


def test_a_graph_that_is_ready_is_measured_next_also_in_the_time_kept_for_the_answer() -> None:
    ready = Graphs(at_once=1, ready={GRAPHED: 20.0})
    measured = {STOCK: 10.0, FAST: 5.0, BF16: 6.0}
    assert job_after(state_of(measured, left_s=8.0, graphs=ready)).policies == (GRAPHED,)
    late = next_job(state_of(measured, left_s=5.0, graphs=ready))
    assert isinstance(late, Answer) or late.kind != "trial", "nothing would compare it with the baseline"


def test_a_start_that_not_even_an_optimistic_estimate_puts_ahead_of_the_leader_is_not_measured() -> None:
    slow = {STOCK: 10.0, replace(STOCK, fused_optimizer=True): 10.0, BF16: 40.0, FP16: 41.0, FAST: 40.0}
    slow |= {replace(FAST, memory_format="contiguous"): 40.0, replace(BF16, memory_format="channels_last"): 40.0}
    slow |= {replace(STOCK, memory_format="channels_last", fused_optimizer=True): 10.0}
    job = next_job(without_graphs(state_of(slow)))
    assert isinstance(job, Answer) or all(one.autocast == "off" for one in job.policies), job


def test_the_precision_that_leads_is_judged_before_more_is_built_on_it() -> None:
    known = without_graphs(state_of(dict.fromkeys(state_of().candidates.starts, 10.0) | {STOCK: 12.0, FAST: 5.0}))
    job = job_after(known)
    assert (job.kind, job.policies) == ("numerics", (replace(BF16, memory_format="channels_last"),))
    assert job_after(known.but(judgements=sound(*job.policies))).kind != "numerics"


def test_modules_are_timed_for_the_leader_alone_and_not_in_fp32() -> None:
    starts = state_of().candidates.starts
    half = without_graphs(state_of(dict.fromkeys(starts, 10.0) | {STOCK: 12.0, FAST: 5.0}))
    job = job_after(half.but(judgements=sound(replace(BF16, memory_format="channels_last"))))
    assert (job.kind, [one.memory_format for one in job.policies]) == ("modules", ["channels_last"])
    wide = without_graphs(state_of(dict.fromkeys(starts, 10.0) | {STOCK: 4.0}))
    assert getattr(next_job(wide), "kind", None) != "modules"


def test_nothing_more_is_tried_once_the_baseline_failed() -> None:
    failed = next_job(state_of({STOCK: CANNOT_RECORD}))
    assert isinstance(failed, Answer)
    assert failed.because == "the baseline itself fails"


def test_a_known_good_policy_outside_of_the_wishes_does_not_lead() -> None:
    fp32 = {"pins": {"autocast": "off"}}
    state = without_graphs(state_of(dict.fromkeys(state_of(wanted=fp32).candidates.starts, 9.0), wanted=fp32))
    state = without_graphs(
        state_of(
            {one: 9.0 if one.autocast == "off" else 3.0 for one in state.history.latest} | {STOCK: 10.0}, wanted=fp32
        )
    )
    assert state.leader.autocast == "off"
    job = next_job(state)
    assert isinstance(job, Answer) or job.kind not in ("numerics", "modules")


def test_on_a_noisy_machine_the_search_goes_on_while_all_are_far_behind_the_baseline() -> None:
    eager = [one for one in state_of().candidates.starts if one.compile == "off"]
    behind = dict.fromkeys(eager[:4], 60.0)
    known = state_of({STOCK: 10.0} | behind, judgements=sound(*behind, *state_of().candidates.halves_alone))
    noisy = [replace(row, outcome=took(15.0), launch="again") for row in known.table if row.policy == STOCK]
    state = without_graphs(known.but(rows=tuple(noisy)))
    assert state.block_deviation > 0.1
    job = job_after(state)
    assert job.kind == "trial"
    assert not set(job.policies) & {STOCK, *behind}


def test_no_more_trials_than_allowed() -> None:
    state = state_of({STOCK: 10.0, FAST: 5.0, BF16: 6.0}, trials=3)
    jobs = [next_job(state)]
    assert all(isinstance(job, Answer) or job.kind in ("numerics", "comparison") for job in jobs)


def test_with_little_time_leader_and_baseline_take_a_turn_in_the_processes_that_run() -> None:
    starts = state_of().candidates.starts
    measured = {STOCK: 10.0} | dict.fromkeys(starts, 9.0) | {FAST: 5.0}
    state = without_graphs(state_of(measured, left_s=6.5, budget_s=60.0))
    job = job_after(state.but(judgements=sound(replace(BF16, memory_format="channels_last"))))
    assert (job.kind, job.fresh) == ("comparison", False)
    assert set(job.policies) >= {STOCK, FAST}


def test_the_winner_is_judged_though_the_budget_is_spent_but_not_long_after() -> None:
    rows = tuple(
        Row(policy=one, outcome=took(ms, in_loop=True), run="this run", launch=f"{k}", moment_s=20.0 + k)
        for k in range(4)
        for one, ms in ((STOCK, 10.0), (FAST, 5.0))
    )
    spent = state_of({STOCK: 10.0, FAST: 5.0}, left_s=0.0, rows=rows)
    assert job_after(spent).kind == "numerics"
    assert isinstance(next_job(state_of({STOCK: 10.0, FAST: 5.0}, left_s=-10.0, rows=rows)), Answer)


@pytest.mark.parametrize("left_s", [0.0, 1.0, 20.0, 100.0])
def test_the_same_state_gives_the_same_job(left_s: float) -> None:
    measured = {STOCK: 10.0, FAST: 5.0, BF16: 6.0, FP16: 7.0}
    assert next_job(state_of(measured, left_s=left_s)) == next_job(state_of(measured, left_s=left_s))


def test_a_model_without_convolutions_has_no_layouts_to_try() -> None:
    state = state_of(of=prepared(convolution_dims=frozenset()))
    assert {one.memory_format for one in state.candidates.starts} == {"contiguous"}
    assert job_after(state).policies == (replace(GRAPHED, memory_format="contiguous"),)


def test_a_graph_of_what_is_far_behind_without_one_gives_its_place_to_another() -> None:
    plain = replace(FAST, memory_format="contiguous")
    state = state_of({STOCK: 10.0, FAST: 9.0, plain: 4.0, FP16: 6.0}, graphs=Graphs(at_once=1, begun={GRAPHED: 95.0}))
    job = job_after(state)
    assert (job.kind, job.policies) == ("compile", (plain.compiled("reduce-overhead"), GRAPHED))
