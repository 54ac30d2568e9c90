"""The decision that a verdict leads to, its evidence and its words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from measurements import took
from simulated.recorded import RecordedEvaluator
from states import state_of
from tables import BF16, BF16_LAST, FP16, decided, in_turn, row

from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity
from amptune.policy.settings import STOCK, Float8Rule, Policy, amp_recipe
from amptune.report.answer import answer_of
from amptune.search.decide.caveats import devices_findings
from amptune.search.decide.conclusion import Conclusion
from amptune.search.decide.decision import Decision, decide
from amptune.search.decided import decision_of
from amptune.search.gate.judge import Judge
from amptune.search.gate.judgements import Judgements, without_graph
from amptune.search.table.effects import CPU, GPU
from amptune.search.table.objective import Objective
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

BREAKS = Parity(failure=Failure(kind="nonfinite", message="the loss is nan"), broken=("head",))
COMPILED = amp_recipe("bf16", compile="default")
# The winner is better than the AMP recipe without channels_last, and that than the other one.
ROUNDS = in_turn({STOCK: [10.0] * 3, BF16_LAST: [5.0] * 3, BF16: [6.0] * 3, FP16: [7.0] * 3})
PREPARED = RecordedEvaluator("resnet50").prepare(1.0)


def judgements_of(*judged: Policy, parity: Callable[[Policy], Parity | Failure] = lambda _: Parity()) -> Judgements:
    judge = Judge(RecordedEvaluator("resnet50", parity=parity), STOCK)
    found = (judge.judge(policy, seconds_for_reference=1.0, limit_s=10.0) for policy in judged)
    return Judgements(STOCK).also(*(one for one in found if one is not None))


def concluded(rows: Sequence[Row], judgements: Judgements | None = None, **more: Any) -> Decision:
    """The decision on these rows, of which the first of each policy is its trial. All can win that the gate lets."""
    judgements = judgements or judgements_of()
    bar = judgements.bar
    first = {one.policy: one.outcome for one in reversed(rows)}
    conclusion = Conclusion(
        verdict=decided(rows, GPU, bar=lambda policy: bar(policy, is_outside=False)),
        trials=tuple(Trial(number=i, policy=p, outcome=of, seconds=2.0) for i, (p, of) in enumerate(first.items())),
        judgements=judgements,
        recipes=(BF16, FP16),
    )
    return decide(conclusion, PREPARED, rows, seconds=120.0, **more)


def evidence(decision: Decision) -> Any:
    return cast("Any", decision.policy_file.evidence)


def found(decision: Decision, code: str) -> list[str]:
    return [str(finding) for finding in decision.findings if finding.code == code]


def test_the_policy_file_claims_what_the_verdict_says() -> None:
    decision = concluded(ROUNDS, judgements_of(BF16_LAST))
    assert decision.winner == BF16_LAST
    assert decision.policy == replace(BF16_LAST, batch_size=128), "the batch size that it was measured with"
    assert decision.speedup == decision.gain == decision.verdict.winner.vs_baseline
    low, high = evidence(decision)["speedup_ci95"]
    assert (low, high) == pytest.approx((decision.speedup.low, decision.speedup.high), rel=1e-3)
    assert evidence(decision)["baseline"]["step_ms"] == 10.0
    assert set(evidence(decision)["ablation"]) == {"memory_format"}, "what was measured with one setting less"
    bought = evidence(decision)["ablation"]["memory_format"]
    assert bought["buys_ci95"][0] < 6 / 5 < bought["buys_ci95"][1]
    assert evidence(decision)["amp_recipe"]["step_ms"] == 6.0, "the better one"


@pytest.mark.parametrize(
    ("own_parallel", "how"),
    [
        (False, "exchange gradients (DistributedDataParallel); samples per second are"),
        (True, "share the model by the workload's parallel(model, tuned); samples per second are"),
    ],
)
def test_how_devices_train_together_is_told(own_parallel: bool, how: str) -> None:
    (told,) = devices_findings(2, replace(PREPARED, devices=2, own_parallel=own_parallel))
    assert told.message.startswith(f"all steps were timed on 2 devices that {how}")


def test_finalists_are_those_measured_more_than_once_the_baseline_the_winner_and_the_amp_recipes() -> None:
    once, twice = amp_recipe("fp16", cudnn_benchmark=True), amp_recipe("fp16", memory_format="channels_last")
    rows = [
        row(STOCK, 10.0),
        *(row(policy, ms, moment_s=2.0) for policy, ms in {BF16_LAST: 4.0, BF16: 6.0, once: 6.5}.items()),
        *(row(twice, 7.0, moment_s=4.0 + i) for i in range(2)),
    ]
    decision = concluded(rows)
    assert {contender.policy for contender in decision.finalists} == {STOCK, BF16_LAST, BF16, twice}
    assert len(evidence(decision)["finalists"]) == 4
    assert once in {contender.policy for contender in decision.verdict.contenders}


def test_a_winner_that_could_not_be_judged_says_why_and_one_in_fp8_asks_for_a_longer_look() -> None:
    no_memory = Failure(kind="oom", message="no memory for the reference")
    (text,) = found(concluded(ROUNDS, judgements_of(BF16_LAST, parity=lambda _: no_memory)), "not-judged")
    assert "were not judged (oom: no memory for the reference): watch its loss" in text
    in_float8 = replace(COMPILED, float8_modules=(Float8Rule(path="body"),))
    (text,) = found(concluded(in_turn({STOCK: [10.0] * 3, in_float8: [5.0] * 3})), "float8-judged-briefly")
    assert "amptune verify POLICY.yaml TARGET --numerics --steps 5000" in text


def test_a_compiled_winner_whose_graph_was_not_judged_says_so_and_how_far_its_losses_are() -> None:
    columns = {STOCK: [took(10, losses=(4.0, 2.0))] * 3, COMPILED: [took(5, losses=(4.0, 2.1))] * 3}
    alone = judgements_of(without_graph(COMPILED))
    decision = concluded(in_turn(columns), alone)
    (text,) = found(decision, "graph-not-judged")
    assert "numerics were judged without torch.compile, and not those of its graph" in text
    assert text.endswith("; the losses of its first steps differ from the baseline's by 5 % at most")
    whole = judgements_of(without_graph(COMPILED), COMPILED)
    assert found(concluded(in_turn(columns), whole), "graph-not-judged") == []


def test_a_compared_policy_that_trains_worse_than_fp32_cannot_win_and_is_told() -> None:
    decision = concluded(ROUNDS, judgements_of(BF16_LAST, parity=lambda _: BREAKS))
    assert decision.winner == BF16
    assert BF16_LAST not in {point.policy for point in decision.points}
    (finding,) = (finding for finding in decision.findings if finding.code == "rejected")
    assert finding.message.startswith("bf16, channels_last cannot win: ")
    assert "the loss is nan" in finding.message
    assert finding.module == "head"
    assert finding.figures["speedup"] == pytest.approx(2.0, rel=0.02)


def test_the_evidence_tells_how_far_the_first_losses_are_from_the_baselines() -> None:
    first, again = (took(10, losses=(4.0, end), gradient_norm=2.0) for end in (2.0, 2.002))
    rows = in_turn({STOCK: [first, again], BF16: [took(5, losses=(4.0, 2.1), gradient_norm=2.2)] * 2})
    parity = evidence(concluded(rows))["parity"]
    assert parity["loss_deviation"] == pytest.approx(0.05)
    assert parity["fp32_loss_deviation"] == pytest.approx(0.001)
    assert parity["gradient_norm_deviation"] == pytest.approx(0.1)


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("train.py", "amptune tune train.py --objective memory --budget 50s --study nowhere"),
        (None, 'amptune.tune(workload, objective="memory", study="nowhere", budget_s=50)'),
    ],
)
def test_the_command_that_gives_an_answer_is_that_of_the_run_with_a_larger_budget(
    target: str | None, command: str
) -> None:
    state = state_of({STOCK: 10.0})
    request = replace(state.request, objective=Objective("memory"), source=replace(state.request.source, target=target))
    decision = decision_of(state.but(request=request))
    assert decision is not None
    assert decision.again == command


def test_where_the_baseline_alone_was_measured_there_is_no_answer_but_the_command_that_gives_one() -> None:
    rows = in_turn({STOCK: [10.0] * 3})
    decision = concluded(rows, again="amptune tune train.py:small --budget 300s")
    lines = answer_of(decision, "policy.yaml")
    assert lines[0] == "no answer yet: the budget was enough for the baseline only"
    assert lines[2] == "policy written to policy.yaml; run amptune tune train.py:small --budget 300s"
    (text,) = found(decision, "budget-too-small")
    assert text == f"{lines[0]}; run amptune tune train.py:small --budget 300s"
    assert not found(decision, "keep")
    assert not any("keep what you have" in str(finding) for finding in decision.findings)
    assert concluded(ROUNDS, again="amptune tune").again is None, "there is an answer"


def test_a_policy_that_was_slow_in_its_only_measurement_is_told_by_its_time_and_by_no_probability() -> None:
    verdict = decided([row(STOCK, 10.0), row(BF16, 11.0, moment_s=2.0)], CPU)
    assert verdict.grounds == "undecided: not enough measurements; bf16 took 1.1 times as long in its only one"
