"""The numerics gate: what needs a judgement, what a judgement bars, and what cures a policy that failed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.recorded import RecordedEvaluator

from amptune.errors import StudyError
from amptune.measure.results.half_effects import ModuleTrace, Reach
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Module, Prepared, Subject
from amptune.measure.results.training_runs import GradientParity, Parity
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Float8Rule, Fp32Rule, Policy, Reason, amp_recipe
from amptune.search.gate.judge import Judge, cure_of
from amptune.search.gate.judgement import Judgement, Unjudged
from amptune.search.gate.judgements import Found, Judgements, without_graph
from amptune.search.gate.repair import Cure

WRONG = GradientParity(name="norm.weight", error=1, bias=1, noise=0.1, rounding=0.01, size=0.5, slope=0.2, vanished=0)
UNSOUND = Parity(gradients=(WRONG,))
NOT_MADE = Failure(kind="nonfinite", message="the loss is nan in the first step of batch 1")
TOO_LARGE = Failure(kind="error", message="value cannot be converted to type at::Half without overflow")
NO_MEMORY = Failure(kind="oom", message="CUDA out of memory")
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
    answers: Callable[[Policy], Parity | Failure] = lambda _: Parity()
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


def found_of(policy: Policy, parity: Parity | Failure = Parity(), baseline: Policy = STOCK) -> Found | None:  # noqa: B008
    judge = Judge(Faulty("resnet50", answers=lambda _: parity), baseline)
    return judge.judge(policy, seconds_for_reference=1.0, limit_s=10.0)


def judgements_of(*policies: Policy, parity: Parity | Failure = Parity()) -> Judgements:  # noqa: B008
    found = (found_of(policy, parity) for policy in policies)
    return Judgements(STOCK).also(*(one for one in found if one is not None))


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
    assert Judgements(baseline).is_exempt(policy) is exempt
    assert (found_of(policy, baseline=baseline) is None) is exempt


@pytest.mark.parametrize(
    ("failure", "policy", "rejected"),
    [
        (TOO_LARGE, FP16, True),
        (Failure(kind="unsupported", message="not implemented for 'Half'"), FP16, True),
        (Failure(kind="unsupported", message="no C++ compiler"), Policy(compile="default"), False),
        (Failure(kind="error", message="a result was overwritten"), Policy(compile="reduce-overhead"), False),
        (NOT_MADE, Policy(compile="reduce-overhead"), True),
        (NO_MEMORY, FP16, False),
        (Failure(kind="timeout", message="no answer"), FP16, False),
    ],
)
def test_what_a_policy_raises_and_fp32_does_not_is_its_own_fault(
    failure: Failure, policy: Policy, *, rejected: bool
) -> None:
    judgements = judgements_of(policy, parity=Parity(failure=failure))
    assert judgements.bars(policy) is rejected
    assert judgements.unjudged_because(policy) == (None if rejected else failure)


def test_without_a_reference_nothing_is_open_and_nothing_is_barred() -> None:
    judgements = judgements_of(BF16, parity=NO_MEMORY)
    assert judgements.failure == NO_MEMORY
    for policy in (BF16, FP16, replace(BF16, compile="default")):
        assert not judgements.is_open(policy)
        assert not judgements.is_graph_open(policy)
        assert not judgements.bars(policy)
        assert not judgements.passes(policy)
        assert judgements.unjudged_because(policy) == NO_MEMORY


def test_without_a_worker_there_is_no_reference() -> None:
    def fails(_: Policy) -> Parity:
        raise StudyError("no worker can be started")

    found = Judge(Faulty("resnet50", answers=fails), STOCK).judge(BF16, seconds_for_reference=1.0, limit_s=10.0)
    assert found == Failure(kind="crash", message="no worker can be started")


# --- the table of judgements -------------------------------------------------------------------------------------

NEEDED = Fp32Rule(path="head", reason=Reason(risk=3.0))
SOME = [
    amp_recipe(dtype, compile=mode, memory_format=layout, fp32_modules=rules)
    for dtype in ("off", "bf16", "fp16")
    for mode in ("off", "default", "reduce-overhead")
    for layout in ("contiguous", "channels_last")
    for rules in ((), (NEEDED,))
    if dtype != "off" or not rules
]
founds = st.builds(
    lambda policy, passes: (
        Unjudged(policy, NO_MEMORY) if passes is None else Judgement(policy=policy, passes=passes, used=0.5, words="")
    ),
    st.sampled_from(SOME),
    st.sampled_from([True, False, None]),
)


@given(st.lists(founds, max_size=8), st.sampled_from(SOME))
def test_what_failed_never_wins_what_is_known_is_not_open_and_the_last_judgement_counts(
    found: list[Judgement | Unjudged], policy: Policy
) -> None:
    judgements = Judgements(STOCK).also(*found)
    own = next((one for one in reversed(found) if one.policy == policy), None)
    if isinstance(own, Judgement) and not judgements.is_exempt(policy):
        assert judgements.known(policy) == own
        assert judgements.passes(policy) is own.passes
        assert own.passes or judgements.bars(policy)
    if own is not None and policy.compile == "off":
        assert not judgements.is_open(policy)
    if judgements.is_exempt(policy):
        assert judgements.passes(policy)
        assert not judgements.is_open(policy)
    if judgements.rejection_of(policy) is not None:
        assert judgements.bars(policy)
        assert judgements.bar(policy, is_outside=False) == "not as good as FP32"
    if judgements.is_open(policy):
        assert not judgements.also(Unjudged(without_graph(policy), NO_MEMORY)).is_open(policy)
    assert not (judgements.is_graph_open(policy) and policy.compile == "off")


def test_a_policy_of_a_dtype_that_failed_needs_the_rules_that_cure_it() -> None:
    judgements = judgements_of(FP16, parity=UNSOUND)
    assert judgements.bars(amp_recipe("fp16", memory_format="channels_last"))
    assert judgements.bars(amp_recipe("fp16", fp32_modules=(Fp32Rule(path="head"),)))
    assert not judgements.bars(amp_recipe("fp16", fp32_modules=(NEEDED,)))
    assert not judgements.bars(BF16)


def test_a_graph_stands_for_the_others_in_its_dtype_until_it_is_judged_itself() -> None:
    graphs = {dtype: Policy(autocast=dtype, compile="default") for dtype in ("bf16", "fp16")}
    judgements = judgements_of(graphs["bf16"]).also(*judgements_of(graphs["fp16"], parity=UNSOUND).found.values())
    last, other = (replace(graphs[dtype], compile="reduce-overhead") for dtype in ("bf16", "fp16"))
    assert not judgements.is_graph_open(last)
    assert not judgements.bars(last)
    assert judgements.bars(other)
    assert not judgements.bars(without_graph(other))
    in_fp32 = Policy(compile="default")
    assert judgements.passes(in_fp32)
    assert judgements.is_graph_open(in_fp32)
    assert judgements.also(*judgements_of(in_fp32, parity=UNSOUND).found.values()).bars(in_fp32)


def test_a_graph_in_fp8_or_of_half_weights_says_nothing_of_one_in_another_precision() -> None:
    graph = Policy(autocast="bf16", compile="default")
    for other in (replace(graph, float8_modules=(Float8Rule(path="head"),)), Policy(weights="half", compile="default")):
        judgements = judgements_of(other, parity=UNSOUND)
        assert judgements.bars(other)
        assert not judgements.bars(graph)


def test_a_graph_that_could_not_be_judged_bars_no_policy_and_is_not_tried_again() -> None:
    graph, other = (Policy(autocast="bf16", compile=mode) for mode in ("reduce-overhead", "default"))
    failed = judgements_of(graph, parity=Parity(failure=TOO_LARGE)).found.values()
    judgements = judgements_of(BF16).also(*failed)
    for policy in (graph, other):
        assert judgements.passes(policy)
        assert not judgements.is_graph_open(policy)
        assert judgements.unjudged_because(policy) == TOO_LARGE
    assert judgements.is_graph_open(replace(other, autocast="fp16"))
    assert judgements.unjudged_because(without_graph(other)) is None


# --- the cure ----------------------------------------------------------------------------------------------------


def cured(
    evaluator: Faulty, until: Callable[[], bool] = lambda: False
) -> tuple[Cure | None, tuple[Finding, ...], tuple[Found, ...]]:
    judge = Judge(evaluator, STOCK)
    rejected = judge.judge(BF16, seconds_for_reference=1.0, limit_s=10.0)
    assert isinstance(rejected, Judgement)
    return cure_of(judge, rejected, evaluator.subject, until=until, limit_s=10.0)


@pytest.mark.parametrize("culprits", [("layer.3.norm",), ("layer.1.conv", "layer.6.norm"), tuple(PATHS[2:20:6])])
@pytest.mark.parametrize("shows", [True, False])
def test_the_cure_is_what_was_at_fault_and_nothing_more(culprits: tuple[str, ...], *, shows: bool) -> None:
    evaluator = Faulty("resnet50", culprits=culprits, shows=shows)
    cure, findings, found = cured(evaluator)
    assert cure is not None
    assert set(cure.modules) == set(culprits)
    assert all(rule.is_needed for rule in cure.rules)
    assert [one.policy for one in found if isinstance(one, Judgement)] == evaluator.judged[1:]
    assert cure.judgements == len(found) == len(set(evaluator.judged)) - 1, "none is judged twice"
    assert findings[-1].code == "cure"


@pytest.mark.parametrize("until_s", [25.0, 450.0, None])
def test_a_search_for_culprits_that_takes_too_long_is_given_up_and_a_fault_outside_of_all_modules_has_no_cure(
    until_s: float | None,
) -> None:
    """With more time something that cures was seen by then, and is better than to go without the dtype."""
    slow = Faulty("resnet50", culprits=("layer.3.norm", "layer.6.conv"), shows=False, judging_s=60.0)
    evaluator = slow if until_s else Faulty("resnet50", answers=lambda _: UNSOUND)
    began_s = evaluator.clock()
    cure, findings, _ = cured(evaluator, lambda: until_s is not None and evaluator.clock() - began_s > until_s)
    assert (cure is None) == (until_s != 450.0)
    assert ("no time" if until_s else "outside of them") in str(findings[-1])


def test_what_breaks_in_the_update_has_no_cure_and_is_not_looked_for() -> None:
    in_update = Failure(kind="nonfinite", message="the scale fell to 0", in_update=True)
    evaluator = Faulty("resnet50", answers=lambda _: Parity(failure=in_update))
    cure, findings, found = cured(evaluator)
    assert (cure, found, len(evaluator.judged)) == (None, (), 1)
    assert "change the step there" in str(findings[0])
