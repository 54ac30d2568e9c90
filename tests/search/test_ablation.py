from __future__ import annotations

import pytest
from measurements import took
from tables import decided, in_turn, row

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Fp32Rule, LossScale, Policy, amp_recipe
from amptune.search.table.ablation import ablated, variants_of
from amptune.search.table.effects import GPU
from amptune.search.table.objective import objective_of

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
    columns = {STOCK: [60.0] * 3, policy: [24.0, 24.1, 23.9], without: [44.0, 44.2, 43.9]}
    of = {one.variant.setting: one.buys for one in ablated(decided(in_turn(columns), GPU), policy)}
    assert of["memory_format"].value == pytest.approx(44 / 24, rel=0.01)
    assert of["memory_format"].low > 1.7
    assert set(of) == {"memory_format"}, "a variant that was not measured says nothing"


def test_a_variant_that_was_measured_once_tells_what_its_one_row_tells() -> None:
    policy, without = amp_recipe("fp16", memory_format="channels_last"), amp_recipe("fp16")
    many = in_turn({STOCK: [60.0] * 5, policy: [24.0] * 5, without: [44.0] * 5}, spread=0.02)
    once = [one for one in many if one.policy != without or one.launch == "comparison 0"]
    (well,), (little,) = (ablated(decided(rows, GPU), policy) for rows in (many, once))
    assert well.buys.value == pytest.approx(little.buys.value, rel=0.02)
    assert well.buys.half_width < little.buys.half_width


def test_a_variant_that_failed_says_nothing() -> None:
    policy, failure = amp_recipe("fp16", memory_format="channels_last"), Failure(kind="oom", message="")
    rows = [*in_turn({STOCK: [60.0] * 3, policy: [24.0] * 3}), row(amp_recipe("fp16"), failure)]
    assert ablated(decided(rows, GPU), policy) == ()


def test_the_baseline_is_the_variant_without_autocast() -> None:
    policy = amp_recipe("fp16")
    (one,) = ablated(decided(in_turn({STOCK: [60.0] * 3, policy: [24.0] * 3}), GPU), policy)
    assert (one.variant.setting, one.variant.policy) == ("autocast", STOCK)
    assert one.buys.value == one.speed.value == pytest.approx(2.5, rel=0.01)


def test_for_memory_a_setting_buys_memory_and_costs_or_gains_speed() -> None:
    policy = amp_recipe("fp16")
    rows = in_turn({STOCK: [took(20.0, 1000)] * 3, policy: [took(19.0, 500)] * 3})
    (one,) = ablated(decided(rows, GPU, objective_of("memory")), policy)
    assert one.buys.value == pytest.approx(2.0, rel=0.01)
    assert one.speed.value == pytest.approx(20 / 19, rel=0.01)


def test_the_baseline_has_nothing_to_ablate() -> None:
    assert ablated(decided(in_turn({STOCK: [60.0] * 3}), GPU), STOCK) == ()
