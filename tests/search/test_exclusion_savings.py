"""What keeping modules in FP32 saves, from times that were taken on an H200 and from made-up ones."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from amptune.measure.results.half_effects import ModuleSensitivity, Sensitivity, Stream
from amptune.measure.results.subject import Module, Subject
from amptune.policy.serialization import adapter_for
from amptune.search.space.exclusions import Price, ladder_by_time, savings_in_order


@cache
def recorded(workload: str) -> Sensitivity:
    """As `amptune.measure.modules.sensitivity_pass` gave it on an H200, torch 2.11, FP32 in TF32, contiguous."""
    content = json.loads((Path(__file__).parent / "h200_sensitivity.json").read_text())
    found: Sensitivity = adapter_for(Sensitivity).validate_python(content[workload])
    return found


def module(
    path: str, fp32_ms: float, half_ms: float, stream: Stream = "half", after: str = "", mib: int = 0
) -> ModuleSensitivity:
    return ModuleSensitivity(
        path=path,
        calls=1,
        fp32_ms=fp32_ms,
        half_ms={"bf16": half_ms},
        stream=stream,
        input_bytes=mib * 2**20,
        output_bytes=mib * 2**20,
        cast_bytes=0,
        producers=(after,) if after else (),
    )


def sensed(*modules: ModuleSensitivity, cast_ms_per_mib: float = 0.0) -> Sensitivity:
    return Sensitivity(
        modules=modules, left_out={}, cast_ms_per_byte=cast_ms_per_mib / 2**20, step_ms=10.0, seconds=1.0
    )


def subject_of(sensitivity: Sensitivity) -> Subject:
    return Subject(
        name="a model",
        source_digest="",
        model_digest="",
        batch_size=1,
        parameters=1,
        leaves=(),
        convolution_dims=frozenset(),
        modules=tuple(Module(path=one.path, types=("Linear", "Module")) for one in sensitivity.modules),
    )


def saved(sensitivity: Sensitivity) -> list[tuple[str, ...]]:
    return savings_in_order(sensitivity, "bf16")


def test_a_module_that_is_faster_in_fp32_is_kept_there() -> None:
    assert saved(sensed(module("slow", 1.0, 0.5), module("fast", 0.5, 1.0, after="slow"))) == [("fast",)]


def test_nothing_is_kept_where_half_is_faster() -> None:
    assert saved(sensed(module("a", 1.0, 0.5), module("b", 1.0, 0.6, after="a"))) == []


def test_a_gain_smaller_than_its_casts_is_none() -> None:
    modules = (module("a", 1.0, 0.5), module("b", 0.5, 1.0, after="a", mib=1), module("c", 1.0, 0.5, after="b", mib=1))
    assert saved(sensed(*modules, cast_ms_per_mib=0.01)) == [("b",)]
    assert saved(sensed(*modules, cast_ms_per_mib=1.0)) == []


def test_neighbours_may_pay_only_together_without_a_cast_between_them() -> None:
    modules = (
        module("a", 1.0, 0.5),
        module("b", 0.5, 1.0, after="a", mib=1),
        module("c", 0.4, 1.0, after="b", mib=1),
        module("d", 1.0, 0.5, after="c", mib=1),
    )
    sensitivity = sensed(*modules, cast_ms_per_mib=0.15)
    price = Price(sensitivity, "bf16")
    assert price.saved(["b", "c"]) > price.saved(["b"]) + price.saved(["c"])
    assert saved(sensitivity)[0] == ("b", "c")


def test_what_passes_on_what_it_is_given_runs_in_fp32_behind_a_module_that_is_kept_there() -> None:
    """A ReLU behind an FP32 convolution works on twice the bytes."""
    modules = (module("conv", 0.9, 1.0), module("relu", 0.8, 0.4, "follows", after="conv"))
    assert Price(sensed(*modules), "bf16").saved(["conv"]) == pytest.approx(1.0 + 0.4 - 0.9 - 0.8)
    assert saved(sensed(*modules)) == []


def test_modules_of_one_kind_are_kept_together() -> None:
    modules = [module(f"layer.{i}", 0.5, 0.7, after=f"layer.{i - 1}" if i else "") for i in range(4)]
    assert saved(sensed(*modules)) == [tuple(f"layer.{i}" for i in range(4))]


def test_a_module_that_was_not_timed_is_never_chosen() -> None:
    untimed = module("dropout", 1.0, 2.0)
    untimed = replace(untimed, fp32_ms=None, half_ms={"bf16": None})
    assert saved(sensed(untimed, module("a", 1.0, 0.5))) == []


def test_on_an_h200_the_single_convolution_is_kept() -> None:
    assert saved(recorded("conv1"))[0] == ("conv",)
    assert Price(recorded("conv1"), "bf16").saved({"conv"}) > 0.1


def test_on_an_h200_vgg_keeps_the_pooling_that_bf16_makes_forty_times_slower_and_the_first_classifier() -> None:
    chosen = [path for modules in saved(recorded("vgg16")) for path in modules]
    assert chosen[0] == "avgpool"
    assert "classifier.0" in chosen[:4]


def test_every_rung_of_the_ladder_covers_the_ones_below_and_says_what_each_rule_saves() -> None:
    sensitivity = recorded("vgg16")
    ladder = ladder_by_time(subject_of(sensitivity), {"contiguous": sensitivity})
    assert str(ladder.rules(1, "bf16", "contiguous")[0]) == "avgpool"
    height = len(ladder.timed["bf16", "contiguous"])
    for depth in range(1, height + 1):
        rules = ladder.rules(depth, "bf16", "contiguous")
        assert all(rule.reason is not None and rule.reason.saves_ms is not None for rule in rules)
    assert ladder.rules(0, "bf16", "contiguous") == ()
    assert ladder.rules(99, "bf16", "contiguous") == ladder.rules(height, "bf16", "contiguous")


def test_a_memory_format_that_was_not_timed_has_no_rungs() -> None:
    sensitivity = recorded("conv1")
    ladder = ladder_by_time(subject_of(sensitivity), {"contiguous": sensitivity})
    assert ladder.rules(1, "bf16", "contiguous")
    assert ladder.rules(1, "bf16", "channels_last") == ()


def test_what_autocast_brings_to_fp32_may_be_run_in_half_but_for_what_comes_last() -> None:
    modules = (
        module("linear", 1.0, 0.5),
        module("norm", 0.2, 0.3, "fp32", after="linear"),
        module("criterion", 0.1, 0.1, "fp32", after="norm"),
    )
    sensitivity = sensed(*modules)
    subject = subject_of(sensitivity)
    named = tuple(replace(one, types=(one.path.title(), "Module")) for one in subject.modules)
    ladder = ladder_by_time(replace(subject, modules=named), {"contiguous": sensitivity})
    assert [str(rule) for rule in ladder.half] == ["norm"]
