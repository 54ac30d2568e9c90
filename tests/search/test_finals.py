from __future__ import annotations

from collections.abc import Mapping

from recorded import RecordedEvaluator

from amptune.measure.outcome import Failure, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.budget import Budget
from amptune.search.finals import FAR_BEHIND_LOOKS, MAX_LAUNCHES, ROUNDS_PER_LAUNCH, Comparison
from amptune.search.ratios import ENOUGH_LAUNCHES, Round, launches_of

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
    turns = {tuple(evaluator.measured[i : i + 3]) for i in range(0, 6, 3)}
    assert len(rounds) >= ENOUGH_LAUNCHES * ROUNDS_PER_LAUNCH
    assert len({tuple(evaluator.measured[i : i + 2]) for i in range(0, len(evaluator.measured), 2)}) > 1
    assert all(set(turn) == {STOCK, FAST, RIVAL} for turn in turns)


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
