from __future__ import annotations

from recorded import RecordedEvaluator

from amptune.measure.outcome import Failure
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.budget import Budget
from amptune.search.decision import Round
from amptune.search.finals import FAR_BEHIND_ROUNDS, MIN_ROUNDS, compare

FAST = amp_recipe("fp16", memory_format="channels_last")
RIVAL = amp_recipe("fp16", memory_format="channels_last", cudnn_benchmark=True)


def compared(evaluator: RecordedEvaluator, *policies: Policy, seconds: float = 60.0, tried: Round | None = None) -> int:
    rounds = compare(
        evaluator,
        policies,
        Budget(seconds=seconds),
        baseline=STOCK,
        tried=tried or {},
        seed=0,
        observer=lambda _: None,
    )
    return len(list(rounds))


def test_finalists_are_measured_in_turn_and_in_changing_order() -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.05)
    rounds = compared(evaluator, STOCK, FAST, RIVAL)
    turns = {tuple(evaluator.measured[i : i + 3]) for i in range(0, 3 * rounds, 3)}
    assert rounds >= MIN_ROUNDS
    assert len(turns) > 1
    assert all(set(turn) == {STOCK, FAST, RIVAL} for turn in turns)


def test_a_policy_far_behind_leaves_its_rounds_to_the_others() -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.05)
    rounds = compared(evaluator, STOCK, FAST, RIVAL, amp_recipe("bf16"))
    assert evaluator.measured.count(amp_recipe("bf16")) == FAR_BEHIND_ROUNDS
    assert evaluator.measured.count(FAST) == rounds
    assert evaluator.measured.count(STOCK) == rounds


def test_a_policy_that_failed_in_the_search_is_not_run_again() -> None:
    evaluator = RecordedEvaluator("resnet50")
    compared(evaluator, STOCK, FAST, tried={FAST: Failure(kind="oom", message="no memory")})
    assert FAST not in evaluator.measured


def test_a_spent_budget_still_gives_one_round() -> None:
    assert compared(RecordedEvaluator("resnet50"), STOCK, FAST, seconds=0.0) == 1
