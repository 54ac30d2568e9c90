"""The numerics gate in tuning: what fails it does not win, and is cured where it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from simulated.recorded import RecordedEvaluator
from test_pipeline import tuned_on

from amptune.measure.results.half_effects import ModuleTrace, Reach
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Module, Prepared, Subject
from amptune.measure.results.training_runs import GradientParity, Parity
from amptune.policy.settings import STOCK, Float8Rule, Policy, amp_recipe
from amptune.search.events import PolicyJudged, TrialEnded
from amptune.search.gate.judge import Judge
from amptune.search.gate.repair import Cure, cure_of
from amptune.search.groundwork import examined
from amptune.search.plan.budget import Budget

WRONG = GradientParity(name="norm.weight", error=1, bias=1, noise=0.1, rounding=0.01, size=0.5, slope=0.2, vanished=0)
UNSOUND = Parity(gradients=(WRONG,))
NOT_MADE = Failure(kind="nonfinite", message="the loss is nan in the first step of batch 1")
TOO_LARGE = Failure(kind="error", message="value cannot be converted to type at::Half without overflow")
PATHS = [f"layer.{i}.{name}" for i in range(8) for name in ("conv", "norm", "relu")]
O2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
FINE = Reach(largest=1.0, largest_fp32=1.0, error=0.001)
BAD = Reach(largest=float("inf"), largest_fp32=1e6, error=float("inf"))


def excluded(policy: Policy) -> set[str]:
    return {str(rule) for rule in policy.fp32_modules}


@dataclass
class Faulty(RecordedEvaluator):
    """A model of which these modules have to stay in FP32; traces show the first, as NaN hides more.

    `answers` judges policies where no module is at fault. A judgement takes `judging_s`.
    """

    culprits: Collection[str] = ()
    shows: bool = True
    answers: Callable[[Policy], Parity] = lambda _: Parity()
    judging_s: float = 0.0

    def prepare(self, limit_s: float) -> Prepared:
        prepared = super().prepare(limit_s)
        modules = [Module(path="layer", types=("ModuleList", "Module"), runs=False)]
        modules += [Module(path=f"layer.{i}", types=("Block", "Module")) for i in range(8)]
        modules += [Module(path=path, types=(path.rpartition(".")[2].title(), "Module")) for path in PATHS]
        return replace(prepared, subject=replace(prepared.subject, modules=tuple(modules)))

    @property
    def subject(self) -> Subject:
        return self.prepare(1.0).subject

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity | Failure:  # noqa: ARG002
        self.clock.advance(self.judging_s)
        self.judged.append(policy)
        sick = policy.autocast != "off" and not set(self.culprits) <= excluded(policy)
        return UNSOUND if sick else self.answers(policy)

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...]:  # noqa: ARG002
        left = [path for path in PATHS if path in self.culprits and path not in excluded(policy)]
        outputs = {path: BAD for path in left[:1] if self.shows}
        return tuple(
            ModuleTrace(
                path=path, type="Linear", inputs=FINE, outputs=outputs.get(path, FINE), gradients_in=FINE,
                gradients_out=FINE, weights=None,
            )
            for path in PATHS
        )  # fmt: skip


def judge_on(evaluator: RecordedEvaluator, baseline: Policy = STOCK, cures_until_s: float = math.inf) -> Judge:
    budget = Budget(seconds=1800.0, started=evaluator.clock(), clock=evaluator.clock)
    return Judge(evaluator, baseline, budget, lambda _: None, cures_until_s=cures_until_s)


def fails(of: Callable[[Policy], bool]) -> Faulty:
    return Faulty("resnet50", answers=lambda policy: UNSOUND if of(policy) else Parity())


# --- the judge ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baseline", "policy", "exempt"),
    [
        (STOCK, STOCK, True),
        (STOCK, Policy(memory_format="channels_last", cudnn_benchmark=True), True),
        (STOCK, Policy(fp32_math="ieee"), True),
        (STOCK, Policy(fp32_math="tf32"), False),
        (Policy(fp32_math="tf32"), STOCK, True),
        (Policy(fp32_math="ieee"), STOCK, False),
        (STOCK, BF16, False),
        (BF16, replace(BF16, batch_size=32), True),
        (BF16, amp_recipe("bf16", memory_format="channels_last"), False),
        (STOCK, Policy(compile="default"), False),
        (STOCK, O2, False),
        (O2, O2, True),
        (O2, STOCK, True),
    ],
)
def test_fp32_as_precise_as_the_users_own_and_the_baseline_itself_are_not_judged(
    baseline: Policy, policy: Policy, *, exempt: bool
) -> None:
    assert judge_on(RecordedEvaluator("resnet50"), baseline).judgements.is_exempt(policy) is exempt


@pytest.mark.parametrize(
    ("failure", "policy", "rejected"),
    [
        (TOO_LARGE, FP16, True),
        (Failure(kind="unsupported", message="not implemented for 'Half'"), FP16, True),
        (Failure(kind="unsupported", message="no C++ compiler"), Policy(compile="default"), False),
        (Failure(kind="error", message="a result was overwritten"), Policy(compile="reduce-overhead"), False),
        (NOT_MADE, Policy(compile="reduce-overhead"), True),
        (Failure(kind="oom", message="CUDA out of memory"), FP16, False),
        (Failure(kind="timeout", message="no answer"), FP16, False),
    ],
)
def test_what_a_policy_raises_and_fp32_does_not_is_its_own_fault(
    failure: Failure, policy: Policy, *, rejected: bool
) -> None:
    judge = judge_on(Faulty("resnet50", answers=lambda _: Parity(failure=failure)))
    judge.judge_graph(policy)
    assert judge.judgements.bars(policy) is rejected
    assert (judge.judgements.unjudged_because(policy) is None) is rejected


# --- the cure ----------------------------------------------------------------------------------------------------


def cured(evaluator: Faulty) -> Cure | None:
    judge = judge_on(evaluator)
    return cure_of(judge, BF16, evaluator.subject, judge.traces_of(BF16))


@pytest.mark.parametrize("culprits", [("layer.3.norm",), ("layer.1.conv", "layer.6.norm"), tuple(PATHS[2:20:6])])
@pytest.mark.parametrize("shows", [True, False])
def test_the_cure_is_what_was_at_fault_and_nothing_more(culprits: tuple[str, ...], *, shows: bool) -> None:
    evaluator = Faulty("resnet50", culprits=culprits, shows=shows)
    cure = cured(evaluator)
    assert cure is not None
    assert set(cure.modules) == set(culprits)
    assert cure.judgements == len(set(evaluator.judged))
    assert all(rule.is_needed for rule in cure.rules)


@pytest.mark.parametrize("until_s", [25.0, 450.0, None])
def test_a_search_for_culprits_that_takes_too_long_is_given_up_and_a_fault_outside_of_all_modules_has_no_cure(
    until_s: float | None,
) -> None:
    """With more time something that cures was seen by then, and is better than to go without the dtype."""
    slow = Faulty("resnet50", culprits=("layer.3.norm", "layer.6.conv"), shows=False, judging_s=60.0)
    evaluator = slow if until_s else fails(lambda policy: policy.autocast == "bf16")
    judge = judge_on(evaluator, cures_until_s=until_s or math.inf)
    judgement = judge.judgement_of(BF16)
    assert judgement is not None
    cure, findings = examined(judge, judgement, evaluator.subject)
    assert (cure is None) == (until_s != 450.0)
    assert ("no time" if until_s else "outside of them") in str(findings[-1])


# --- graphs ------------------------------------------------------------------------------------------------------


def test_a_graph_stands_for_the_others_in_its_dtype_until_it_is_judged_itself() -> None:
    judge = judge_on(fails(lambda policy: policy.compile != "off" and policy.autocast != "bf16"))
    for dtype in ("bf16", "fp16"):
        judge.judge_graph(Policy(autocast=dtype, compile="default"))
    last, other = (Policy(autocast=dtype, compile="reduce-overhead") for dtype in ("bf16", "fp16"))
    assert not judge.judgements.is_graph_open(last)
    assert not judge.judgements.bars(last)
    assert judge.judgements.bars(other)
    assert not judge.judgements.bars(replace(other, compile="off"))
    in_fp32 = Policy(compile="default")
    assert judge.judgements.passes(in_fp32)
    judge.judge_graph(in_fp32)
    assert judge.judgements.bars(in_fp32)


def test_a_graph_in_fp8_or_of_half_weights_says_nothing_of_one_in_another_precision() -> None:
    graph = Policy(autocast="bf16", compile="default")
    for other in (replace(graph, float8_modules=(Float8Rule(path="head"),)), Policy(weights="half", compile="default")):
        judge = judge_on(Faulty("resnet50", answers=lambda _: UNSOUND))
        judge.judge_graph(other)
        assert judge.judgements.bars(other)
        assert not judge.judgements.bars(graph)


def test_a_graph_that_could_not_be_judged_bars_no_policy_and_is_not_tried_again() -> None:
    raising = Parity(failure=TOO_LARGE)
    judge = judge_on(Faulty("resnet50", answers=lambda policy: raising if policy.compile != "off" else Parity()))
    graph, other = (Policy(autocast="bf16", compile=mode) for mode in ("reduce-overhead", "default"))
    judge.judgement_of(graph)
    judge.judge_graph(graph)
    for policy in (graph, other):
        assert judge.judgements.passes(policy)
        assert not judge.judgements.is_graph_open(policy)
        assert judge.judgements.unjudged_because(policy) == TOO_LARGE
    assert judge.judgements.is_graph_open(replace(other, autocast="fp16"))
    assert judge.judgements.unjudged_because(replace(other, compile="off")) is None


def test_a_dtype_that_nothing_cures_is_not_searched_and_may_come_back_in_a_later_tuning(tmp_path: Path) -> None:
    """As where there was no time to find its cure."""
    pins = {"compile": "off", "cuda_graphs": "false", "cudnn_benchmark": "false"}
    decision, events = tuned_on(fails(lambda policy: policy.autocast == "fp16"), tmp_path, pins=pins, trials=20)
    assert decision.policy.autocast != "fp16"
    judged = [isinstance(event, PolicyJudged) and event.judgement.policy.autocast == "fp16" for event in events]
    later = [event.trial.policy for event in events[judged.index(True) :] if isinstance(event, TrialEnded)]
    assert "fp16" not in {policy.autocast for policy in later}
    again, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path, pins=pins, trials=10)
    assert len(again.trials) > len(decision.trials)
    assert again.policy.autocast == "fp16"
