"""What a setting changes is said in one place, and one that nobody has thought about changes everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

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
from amptune.search.gate.judgements import Judgements

FUSED, BF16, COMPILED = Policy(fused_optimizer=True), Policy(autocast="bf16"), Policy(compile="default")
NHWC = Policy(memory_format="channels_last")
O2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
AGAINST_STOCK = Judgements(STOCK)


@pytest.fixture
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fused optimizer as a knob that says nothing of its effects."""
    cached = (numerics_of, rounding_of, memory_of, tensors_of, graph_of)
    silent = [Knob(name=knob.name, stock=False) if knob.name == "fused_optimizer" else knob for knob in KNOBS]
    monkeypatch.setattr(setting_effects, "KNOBS", silent)
    for of in cached:
        of.cache_clear()
    yield
    for of in cached:
        of.cache_clear()


def test_a_policy_has_a_field_for_each_knob_in_the_registrys_order() -> None:
    assert [(one.name, one.default) for one in fields(Policy)] == [(knob.name, knob.stock) for knob in KNOBS]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_the_values_of_a_knob_are_those_of_its_field_and_stock_comes_first(knob: Knob) -> None:
    hint = get_type_hints(Policy)[knob.name]
    words = get_args(get_args(hint)[-1]) if bool in get_args(hint) else ()  # true, false, or one of some words
    truth = (False, True, *words) if hint is bool or words else ()
    assert knob.values == (truth or (get_args(hint) if isinstance(knob.stock, str) else ()))
    assert knob.values[:1] in ((), (knob.stock,))


@pytest.mark.usefixtures("_forgotten")
def test_a_setting_without_effects_is_judged_and_has_its_own_memory_and_graph() -> None:
    assert not AGAINST_STOCK.is_exempt(FUSED)
    assert STOCK not in (numerics_of(FUSED), memory_of(FUSED), tensors_of(FUSED), graph_of(FUSED))


def test_what_is_as_precise_as_stock_needs_no_judgement() -> None:
    exempt = [FUSED, NHWC, Policy(fp32_math="ieee"), Policy(cuda_graphs=True, cudnn_benchmark=True)]
    judged = [Policy(fp32_math="tf32"), COMPILED, BF16, replace(BF16, fp32_math="tf32")]
    assert [one for one in (*exempt, *judged) if AGAINST_STOCK.is_exempt(one)] == exempt


@pytest.mark.parametrize(
    ("of", "one", "other", "alike"),
    [
        (numerics_of, FUSED, STOCK, True),
        (numerics_of, NHWC, STOCK, False),
        # a model may keep products out of autocast by itself
        (numerics_of, replace(BF16, fp32_math="tf32"), BF16, False),
        (rounding_of, replace(BF16, fp32_math="tf32"), BF16, False),
        (memory_of, replace(BF16, fp32_math="tf32"), BF16, True),
        (memory_of, FUSED, STOCK, True),
        (memory_of, BF16, Policy(autocast="fp16", loss_scale=LossScale(init=8.0)), True),
        (memory_of, Policy(autocast="bf16", fp32_math="ieee", fp32_modules=(Fp32Rule(path="head"),)), BF16, True),
        (memory_of, Policy(fp32_math="ieee"), STOCK, False),
        (memory_of, O2, Policy(weights="half", master_weights=True), True),
        (tensors_of, Policy(fp32_math="ieee"), STOCK, True),
        (tensors_of, O2, Policy(weights="half"), True),
        (graph_of, replace(FUSED, compile="default", cudnn_benchmark=True, accumulate=4), COMPILED, True),
        (graph_of, COMPILED, Policy(compile="reduce-overhead"), False),
        (process_of, replace(BF16, memory_format="channels_last"), STOCK, True),
        (process_of, Policy(cudnn_benchmark=True), STOCK, False),
        (process_of, COMPILED, STOCK, False),
    ],
)
def test_policies_share_what_their_settings_do_not_change(
    of: Callable[[Policy], Any], one: Policy, other: Policy, *, alike: bool
) -> None:
    assert (of(one) == of(other)) is alike
