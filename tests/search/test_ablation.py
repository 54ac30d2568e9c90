from __future__ import annotations

import pytest
from test_verdict import rounds_of

from amptune.policy.settings import STOCK, Fp32Rule, LossScale, Policy, amp_recipe
from amptune.search.table.ablation import ablated, dropped, variants_of
from amptune.search.table.ratio import Round

STEM, HEAD = Fp32Rule(path="stem"), Fp32Rule(path="head")
FULL = Policy(autocast="fp16", fp32_math="tf32", fp32_modules=(STEM, HEAD), memory_format="channels_last")


def test_each_departure_from_stock_has_a_variant_without_it() -> None:
    of = {variant.setting: variant for variant in variants_of(FULL)}
    assert list(of) == ["autocast", "fp32_math", "fp32_modules: stem", "fp32_modules: head", "memory_format"]
    assert of["memory_format"].policy.memory_format == "contiguous"
    assert of["fp32_modules: stem"].policy.fp32_modules == (HEAD,)
    assert (of["memory_format"].value, of["memory_format"].reverted_to) == ("channels_last", "contiguous")


def test_stock_pytorch_has_no_variants_and_the_users_batch_size_is_none() -> None:
    assert variants_of(STOCK) == ()
    assert variants_of(Policy(batch_size=64, accumulate=4)) == ()


def test_without_autocast_there_are_no_fp32_rules_and_no_loss_scale() -> None:
    policy = Policy(autocast="fp16", fp32_modules=(HEAD,), loss_scale=LossScale(init=1024.0))
    assert variants_of(policy)[0].policy == STOCK


def test_the_last_fp32_rule_takes_the_fp32_math_along() -> None:
    policy = Policy(autocast="bf16", fp32_math="tf32", fp32_modules=(HEAD,))
    of = {variant.setting: variant.policy for variant in variants_of(policy)}
    assert of["fp32_modules: head"] == amp_recipe("bf16")


def test_many_fp32_rules_are_reverted_at_once() -> None:
    rules = tuple(Fp32Rule(path=name) for name in "abcd")
    (_, variant) = variants_of(Policy(autocast="bf16", fp32_modules=rules))
    assert variant.policy.fp32_modules == ()
    assert variant.setting == "fp32_modules: a + b + c + d"


def test_what_a_setting_buys_is_the_speed_with_it_over_the_speed_without() -> None:
    policy = amp_recipe("fp16", memory_format="channels_last")
    without = amp_recipe("fp16")
    rounds = rounds_of((STOCK, [60.0] * 3), (policy, [24.0, 24.1, 23.9]), (without, [44.0, 44.2, 43.9]))
    of = {one.variant.setting: one.buys for one in ablated(rounds, policy)}
    assert of["memory_format"].value == pytest.approx(44 / 24, rel=0.01)
    assert of["memory_format"].low > 1.8
    assert set(of) == {"memory_format"}, "a variant that was not measured says nothing"


def test_a_dropped_setting_is_named_with_what_it_bought() -> None:
    policy = amp_recipe("fp16", cudnn_benchmark=True)
    rounds: list[Round] = rounds_of((policy, [24.0, 24.1, 23.9]), (amp_recipe("fp16"), [24.0, 24.0, 24.0]))
    (finding,) = dropped(ablated(rounds, policy), amp_recipe("fp16"))
    assert finding.code == "setting-dropped"
    assert "cudnn_benchmark: True bought nothing (1.000× [0.990, 1.010]), so it was dropped" in str(finding)


def test_a_math_mode_that_goes_with_the_last_excluded_module_is_not_said_to_have_bought_nothing() -> None:
    policy, without = Policy(autocast="bf16", fp32_math="tf32", fp32_modules=(HEAD,)), amp_recipe("bf16")
    in_ieee = Policy(autocast="bf16", fp32_modules=(HEAD,))
    rounds = rounds_of((policy, [24.0] * 3), (in_ieee, [30.0] * 3), (without, [24.0] * 3))
    assert [finding.figures["setting"] for finding in dropped(ablated(rounds, policy), without)] == [
        "fp32_modules: head"
    ]


def test_a_module_that_goes_with_the_autocast_it_was_kept_out_of_is_not_said_to_have_bought_nothing() -> None:
    policy = Policy(autocast="bf16", fp32_modules=(HEAD,))
    rounds = rounds_of((policy, [24.0] * 3), (amp_recipe("bf16"), [30.0] * 3), (STOCK, [24.0] * 3))
    found = dropped(ablated(rounds, policy), STOCK)
    assert [finding.figures["setting"] for finding in found] == ["autocast"]
