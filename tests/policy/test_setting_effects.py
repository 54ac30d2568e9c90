"""What a setting changes is said in one place, and one that nobody has thought about changes everything."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from amptune.policy import setting_effects
from amptune.policy.knobs.knob import Knob
from amptune.policy.setting_effects import (
    graph_of,
    memory_of,
    numerics_of,
    process_of,
    rounding_of,
    tensors_of,
)
from amptune.policy.settings import KNOBS, STOCK, Fp32Rule, LossScale, Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Judgements

FUSED = Policy(fused_optimizer=True)
AGAINST_STOCK: Judgements[Judgement] = Judgements(STOCK)


def _forget() -> None:
    for of in (numerics_of, rounding_of, memory_of, tensors_of, graph_of):
        of.cache_clear()


@pytest.fixture
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused optimizer as a knob that says nothing of its effects."""
    silent = Knob(name="fused_optimizer", stock=False)
    monkeypatch.setattr(
        setting_effects, "KNOBS", [silent if knob.name == "fused_optimizer" else knob for knob in KNOBS]
    )
    _forget()


def test_a_policy_has_a_field_for_each_knob_in_the_registrys_order() -> None:
    assert [(one.name, one.default) for one in fields(Policy)] == [(knob.name, knob.stock) for knob in KNOBS]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_the_values_of_a_knob_are_those_of_its_field_and_stock_comes_first(knob: Knob) -> None:
    hint = get_type_hints(Policy)[knob.name]
    words = get_args(get_args(hint)[-1]) if bool in get_args(hint) else ()  # true, false, or one of some words
    truth = (False, True, *words) if hint is bool or words else ()
    assert knob.values == (truth or (get_args(hint) if isinstance(knob.stock, str) else ()))
    assert knob.values[:1] in ((), (knob.stock,))


def test_a_fused_optimizer_changes_neither_numerics_nor_memory_nor_the_graph() -> None:
    assert AGAINST_STOCK.is_exempt(FUSED)
    assert numerics_of(FUSED) == memory_of(FUSED) == graph_of(FUSED) == STOCK


@pytest.mark.usefixtures("_forgotten")
def test_a_setting_without_effects_is_judged_and_has_its_own_memory_and_graph() -> None:
    try:
        assert not AGAINST_STOCK.is_exempt(FUSED)
        assert STOCK not in (numerics_of(FUSED), memory_of(FUSED), tensors_of(FUSED), graph_of(FUSED))
    finally:
        _forget()


def test_a_layout_is_judged_with_a_precision_and_needs_no_judgement_by_itself() -> None:
    nhwc = Policy(memory_format="channels_last")
    assert AGAINST_STOCK.is_exempt(nhwc)
    assert numerics_of(nhwc) != STOCK


@pytest.mark.parametrize(
    ("policy", "exempt"),
    [
        (Policy(fp32_math="ieee"), True),
        (Policy(fp32_math="tf32"), False),
        (Policy(compile="default"), False),
        (Policy(autocast="bf16"), False),
        (Policy(cuda_graphs=True, cudnn_benchmark=True), True),
    ],
)
def test_what_is_as_precise_as_stock_needs_no_judgement(policy: Policy, *, exempt: bool) -> None:
    assert AGAINST_STOCK.is_exempt(policy) is exempt


def test_policies_with_one_graph_share_the_compilers_cache() -> None:
    """The rule for what compiling costs and that for what the sampler expects it to cost differed."""
    one = Policy(compile="default", cudnn_benchmark=True, fused_optimizer=True, accumulate=4)
    assert graph_of(one) == graph_of(Policy(compile="default")) != graph_of(Policy(compile="reduce-overhead"))


def test_both_half_precisions_take_the_same_memory_and_ieee_math_its_own_where_it_computes() -> None:
    bf16, fp16 = Policy(autocast="bf16"), Policy(autocast="fp16", loss_scale=LossScale(init=8.0))
    assert memory_of(bf16) == memory_of(fp16)
    kept = Policy(autocast="bf16", fp32_math="ieee", fp32_modules=(Fp32Rule(path="head"),))
    assert memory_of(kept) == memory_of(bf16)
    assert memory_of(Policy(fp32_math="ieee")) != memory_of(STOCK)
    assert tensors_of(Policy(fp32_math="ieee")) == tensors_of(STOCK)


def test_half_weights_keep_their_meaning_without_settings_that_change_nothing_here() -> None:
    o2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
    assert tensors_of(o2) == Policy(weights="half")
    assert memory_of(o2) == Policy(weights="half", master_weights=True)


def test_policies_share_a_process_unless_what_they_do_to_it_lasts() -> None:
    assert process_of(Policy(autocast="bf16", memory_format="channels_last")) == process_of(STOCK)
    lasting = {process_of(one) for one in (STOCK, Policy(cudnn_benchmark=True), Policy(compile="default"))}
    assert len(lasting) == 3
