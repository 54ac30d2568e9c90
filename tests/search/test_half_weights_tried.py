"""Half weights in the search: what a space that has them stands for, and what a pin makes of one that has not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from simulated.recorded import RecordedEvaluator

from amptune.errors import SpaceError
from amptune.measure.results.half_effects import ModuleTrace, Reach
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity
from amptune.policy.setting_effects import memory_of
from amptune.policy.settings import STOCK, Fp32Rule, LossScale, Policy, Reason, amp_recipe
from amptune.search.gate.judgement import Judgement, judged
from amptune.search.gate.judgements import Judgements, fp32_of, is_graph_like
from amptune.search.gate.numeric_findings import findings_of
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import points
from amptune.search.table.ablation import variants_of

O2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
WITH_HALF_WEIGHTS = {"maxwell", "pascal-6.0", "pascal-6.1", "turing", "volta"}


def candidates(space: str | None = None, **pins: str) -> Candidates:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    return candidates_for(prepared, Wanted(baseline=STOCK, space=space, pins=pins))


def policies(tried: Candidates) -> list[Policy]:
    return [tried.policy_of(point) for point in points(tried.space)]


@pytest.mark.parametrize("space", sorted(WITH_HALF_WEIGHTS))
def test_half_weights_are_tried_with_master_weights_and_never_under_autocast(space: str) -> None:
    tried = policies(candidates(space))
    half = [policy for policy in tried if policy.weights == "half"]
    assert half
    assert {policy.recipe for policy in half} == {O2}
    assert {policy.weights for policy in tried if policy.autocast != "off"} == {"fp32"}
    assert O2 in candidates(space).first


def test_pinned_half_weights_are_tried_where_the_space_has_none() -> None:
    tried = candidates(weights="half")
    assert {policy.recipe for policy in policies(tried)} == {O2}
    assert {STOCK, amp_recipe("bf16"), amp_recipe("fp16")} <= set(tried.known_good)
    assert O2 in tried.first


def test_master_weights_and_batchnorm_can_be_pinned_beside_them() -> None:
    tried = candidates(weights="half", master_weights="false", keep_batchnorm_fp32="off")
    assert {policy.recipe for policy in policies(tried)} == {Policy(weights="half")}


@pytest.mark.parametrize("space", [None, "volta"])
def test_pins_that_contradict_each_other_are_refused(space: str | None) -> None:
    with pytest.raises(SpaceError) as caught:
        candidates(space, weights="half", autocast="fp16")
    assert str(caught.value) == (
        "--set weights=half and --set autocast=fp16 contradict each other; leave one of them out"
    )
    with pytest.raises(SpaceError) as caught:
        candidates(space, weights="fp32", master_weights="true")
    assert str(caught.value) == "--set master_weights=true means nothing for FP32 weights; add --set weights=half"


def test_what_half_weights_need_stays_in_fp32_in_all_of_them_and_what_nothing_cures_is_not_tried() -> None:
    rule = Fp32Rule(path="fc", reason=Reason(risk=9.0))
    tried = candidates("volta")
    assert tried.halves_alone == (amp_recipe("fp16"), O2)
    cured = policies(tried.guarded({"half": (rule,)}))
    assert {policy.fp32_modules for policy in cured if policy.weights == "half"} == {(rule,)}
    assert all(rule not in policy.fp32_modules for policy in cured if policy.weights == "fp32")
    assert {policy.weights for policy in policies(tried.guarded({"half": None}))} == {"fp32"}


def test_a_policy_is_allowed_whose_settings_mean_nothing_for_its_weights() -> None:
    assert candidates("volta").allows(STOCK)
    assert candidates("volta").allows(O2)
    assert not candidates("volta").allows(Policy(weights="half"))
    assert not candidates(weights="half").allows(amp_recipe("fp16"))


def test_half_weights_are_judged_and_are_no_users_fp32() -> None:
    against_stock: Judgements[Judgement] = Judgements(STOCK)
    assert not against_stock.is_exempt(O2)
    assert replace(against_stock, baseline=O2).is_exempt(O2)
    assert fp32_of(Policy(weights="half", fp32_math="tf32")) == STOCK
    assert not is_graph_like(Policy(weights="half", compile="default"), Policy(compile="default"))


def test_without_half_weights_there_is_nothing_of_theirs_and_master_weights_are_not_reverted_alone() -> None:
    policy = Policy(
        weights="half", master_weights=True, keep_batchnorm_fp32=True, cudnn_benchmark=True, loss_scale=LossScale()
    )
    of = {variant.setting: variant.policy for variant in variants_of(policy)}
    assert set(of) == {"weights", "cudnn_benchmark", "loss_scale"}
    assert of["weights"] == Policy(cudnn_benchmark=True)


def test_each_kind_of_weights_checkpoints_and_graphs_take_a_memory_of_their_own() -> None:
    others = Policy(weights="half"), O2, Policy(checkpoint=("layers",)), Policy(cuda_graphs=True)
    assert len({memory_of(policy) for policy in (STOCK, amp_recipe("fp16"), *others)}) == 6


def test_what_is_found_of_their_numerics_names_them() -> None:
    parity = Parity(failure=Failure(kind="nonfinite", message="the loss is nan"))
    judgement = judged(O2, parity)
    reach = Reach(largest=1.0, largest_fp32=1e6, error=0.0)
    trace = ModuleTrace(
        path="head",
        type="Linear",
        inputs=reach,
        outputs=replace(reach, largest=math.inf),
        gradients_in=None,
        gradients_out=None,
        weights=None,
    )
    where, unsound = findings_of(judgement, None, [trace])
    assert str(where).startswith("head: with half weights its inputs are finite (largest 1), its output is not")
    assert str(where).endswith("in FP32 it reaches 1e+06, and fp16 holds 6.55e+04 at most")
    assert where.figures["weights"] == "half"
    assert str(unsound).startswith("training with half weights is not as good as FP32 (nonfinite: the loss is nan); no")
