from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from simulated.landscape import NO_TROUBLE, SimulatedClock, SyntheticEvaluator, landscape_of
from simulated.recorded import RecordedEvaluator

from amptune.measure.results.outcome import Failure, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.comparison import FAR_BEHIND_LOOKS, MAX_LAUNCHES, ROUNDS_PER_LAUNCH, Comparison
from amptune.search.plan.budget import Budget
from amptune.search.table.ratio import ENOUGH_LAUNCHES, Round, launches_of

FAST = amp_recipe("fp16", memory_format="channels_last")
RIVAL = amp_recipe("fp16", memory_format="channels_last", cudnn_benchmark=True)


def compared(
    evaluator: RecordedEvaluator,
    *policies: Policy,
    seconds: float = 60.0,
    tried: Mapping[Policy, Outcome] | None = None,
    start_s: float = 0.0,
) -> list[Round]:
    comparison = Comparison(
        evaluator=evaluator,
        policies=policies,
        baseline=STOCK,
        budget=Budget(seconds=seconds),
        stage="finals",
        observer=lambda _: None,
        tried=tried or {},
        start_s=start_s,
    )
    return list(comparison.rounds())


def test_contenders_are_measured_in_turn_and_in_changing_order() -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.05)
    rounds = compared(evaluator, STOCK, FAST, RIVAL)
    turns = [tuple(evaluator.measured[i : i + 3]) for i in range(0, 2 * 3 * ROUNDS_PER_LAUNCH, 3)]
    assert len(rounds) >= ENOUGH_LAUNCHES * ROUNDS_PER_LAUNCH
    assert all(set(turn) == {STOCK, FAST, RIVAL} for turn in turns)
    assert len(set(turns)) > 1


def test_each_launch_starts_every_contender_anew() -> None:
    evaluator = RecordedEvaluator("resnet50")
    rounds = compared(evaluator, STOCK, FAST)
    assert evaluator.launched == [(STOCK, FAST)] * launches_of(rounds)
    assert ENOUGH_LAUNCHES < launches_of(rounds) < MAX_LAUNCHES
    assert [one.launch for one in rounds[:6]] == [0, 0, 0, 1, 1, 1]


def test_a_policy_far_behind_leaves_its_rounds_to_the_others() -> None:
    evaluator = RecordedEvaluator("resnet50")
    rounds = compared(evaluator, STOCK, FAST, RIVAL, amp_recipe("bf16"))
    assert evaluator.measured.count(amp_recipe("bf16")) == FAR_BEHIND_LOOKS
    assert evaluator.measured.count(FAST) == len(rounds)
    assert evaluator.measured.count(STOCK) == len(rounds)
    assert amp_recipe("bf16") not in evaluator.launched[1]


def test_a_policy_that_failed_before_is_not_run_again_and_stands_there_with_its_failure() -> None:
    evaluator = RecordedEvaluator("resnet50")
    failure = Failure(kind="oom", message="no memory")
    rounds = compared(evaluator, STOCK, FAST, RIVAL, tried={FAST: failure})
    assert FAST not in evaluator.measured
    assert rounds[0].outcomes[FAST] == failure


def test_a_policy_that_dies_here_twice_is_out() -> None:
    crash = Failure(kind="crash", message="gone")
    evaluator = RecordedEvaluator("resnet50", interfere=lambda policy: crash if policy == FAST else None)
    rounds = compared(evaluator, STOCK, FAST, RIVAL)
    assert evaluator.measured.count(FAST) == 2
    assert rounds[0].outcomes[FAST] == crash


def test_a_spent_budget_still_gives_one_round() -> None:
    assert len(compared(RecordedEvaluator("resnet50"), STOCK, FAST, seconds=0.0)) == 1


def test_a_budget_without_time_for_a_launch_uses_the_processes_that_run() -> None:
    evaluator = RecordedEvaluator("resnet50")
    compared(evaluator, STOCK, FAST, seconds=0.5, start_s=10.0)
    assert evaluator.launched == []
    assert {STOCK, FAST} <= set(evaluator.measured)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.001, 3, 3), (0.03, 6, 12)])
def test_where_a_launch_is_dear_and_rounds_are_noisy_a_launch_holds_more_of_them(
    noise: float, least: int, most: int
) -> None:
    clock = SimulatedClock()
    evaluator = SyntheticEvaluator(landscape_of("resnet50"), clock, replace(NO_TROUBLE, noise=noise, launch_s=30.0), 0)
    comparison = Comparison(
        evaluator=evaluator,
        policies=(STOCK, FAST, RIVAL),
        baseline=STOCK,
        budget=Budget(seconds=3000.0, started=0.0, clock=clock),
        stage="finals",
        observer=lambda _: None,
    )
    rounds = Counter(one.launch for one in comparison.rounds())
    assert len(rounds) >= ENOUGH_LAUNCHES
    assert all(least <= count <= most for count in rounds.values())


@pytest.mark.parametrize("seconds", [90.0, 103.0, 131.0, 180.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_more_rounds_leave_time_for_three_launches(seconds: float, seed: int) -> None:
    clock = SimulatedClock()
    trouble = replace(NO_TROUBLE, noise=0.05, launch_s=10.0)
    evaluator = SyntheticEvaluator(landscape_of("resnet50"), clock, trouble, seed)
    comparison = Comparison(
        evaluator=evaluator,
        policies=(STOCK, FAST),
        baseline=STOCK,
        budget=Budget(seconds=seconds, started=0.0, clock=clock),
        stage="finals",
        observer=lambda _: None,
    )
    rounds = list(comparison.rounds())
    assert launches_of(rounds) >= ENOUGH_LAUNCHES
    assert len(rounds) > ENOUGH_LAUNCHES * ROUNDS_PER_LAUNCH
    assert clock() <= seconds + 5.0


def test_what_a_comparison_is_about_is_measured_to_the_end() -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.002, true_ms=lambda policy: 20.0 if policy == STOCK else 40.0)
    comparison = Comparison(
        evaluator=evaluator,
        policies=(STOCK, FAST, RIVAL),
        baseline=STOCK,
        budget=Budget(seconds=60.0),
        stage="verify",
        observer=lambda _: None,
        kept=(FAST,),
    )
    rounds = list(comparison.rounds())
    assert launches_of(rounds) >= ENOUGH_LAUNCHES
    assert FAST in rounds[-1].outcomes
    assert RIVAL not in rounds[-1].outcomes


def test_one_that_is_clearly_slower_is_dropped_at_once_and_one_that_is_a_little_slower_after_three_launches() -> None:
    slower, little = amp_recipe("bf16"), amp_recipe("fp16")
    factors = {slower: 1.15, little: 1.05, STOCK: 1.3}
    evaluator = RecordedEvaluator("resnet50", noise=0.001, true_ms=lambda policy: 20.0 * factors.get(policy, 1.0))
    rounds = compared(evaluator, STOCK, FAST, little, slower)
    launched = Counter(policy for contenders in evaluator.launched for policy in contenders)
    assert launched[slower] == 1
    assert launched[little] == ENOUGH_LAUNCHES
    assert launched[FAST] == launched[STOCK] == launches_of(rounds)
