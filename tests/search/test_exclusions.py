"""Which modules are kept in FP32 first: by their arithmetic, or by times that were taken on an H200 or made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from simulated.recorded import BODY, HEAD, NORM, STEM, RecordedEvaluator

from amptune.measure.results.half_effects import ModuleSensitivity, Sensitivity, Stream
from amptune.measure.results.subject import Leaf, Module, Subject
from amptune.policy.serialization import adapter_for
from amptune.policy.settings import Fp32Rule
from amptune.search.space.exclusions import groups_by_intensity, ladder_by_time, savings_in_order
from amptune.search.space.module_rules import covered_by

SUBJECT = RecordedEvaluator("resnet50").prepare(1.0).subject
HEAD_RULE, STEM_RULE = Fp32Rule(path="head"), Fp32Rule(path="stem")


@cache
def recorded(workload: str) -> Sensitivity:
    """As `amptune.measure.modules.sensitivity_pass` gave it on an H200, torch 2.11, FP32 in TF32, contiguous."""
    content = json.loads((Path(__file__).parent / "h200_sensitivity.json").read_text())
    found: Sensitivity = adapter_for(Sensitivity).validate_python(content[workload])
    return found


def linear(path: str, called: int) -> Leaf:
    return Leaf(path=path, type="Linear", parameters=100, flops=10**6, cast_numel=10**4, called=called)


@pytest.mark.parametrize(
    ("leaves", "rules"),
    [
        ((STEM, BODY, NORM, HEAD), [HEAD_RULE, STEM_RULE, Fp32Rule(type="Conv2d"), Fp32Rule(type="BatchNorm2d")]),
        ((linear("", 0),), [Fp32Rule(type="Linear")]),
        ((replace(HEAD, flops=0, cast_numel=0, called=None),), []),
        (
            (STEM, BODY, linear("classifier.0", 2), linear("classifier.3", 3)),
            [STEM_RULE, Fp32Rule(path="classifier"), Fp32Rule(type="Conv2d")],
        ),
    ],
    ids=["least to gain first", "a model that is one module", "a module the pass did not reach", "a classifier"],
)
def test_groups_come_in_the_order_of_what_half_precision_has_to_gain(
    leaves: tuple[Leaf, ...], rules: list[Fp32Rule]
) -> None:
    subject = replace(SUBJECT, leaves=leaves, parameters=sum(leaf.parameters for leaf in leaves))
    groups = groups_by_intensity(subject)
    assert [group.rule for group in groups] == rules
    seen: set[str] = set()
    for group in groups:
        paths = {leaf.path for leaf in group.leaves}
        assert not paths <= seen, "no group repeats what stands before it"
        seen |= paths


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
        producers=(after,) if after else (),
    )


def sensed(*modules: ModuleSensitivity, cast_ms_per_mib: float = 0.0) -> Sensitivity:
    return Sensitivity(modules=modules, cast_ms_per_byte=cast_ms_per_mib / 2**20)


A, B, D = module("a", 1.0, 0.5), module("b", 0.5, 1.0, after="a", mib=1), module("d", 1.0, 0.5, after="c", mib=1)
LAYERS = [module(f"layer.{i}", 0.5, 0.7, after=f"layer.{i - 1}" if i else "") for i in range(4)]


@pytest.mark.parametrize(
    ("modules", "cast_ms", "kept"),
    [
        ((A, B), 0.0, [("b",)]),
        ((A, B, module("c", 1.0, 0.5, after="b", mib=1)), 0.01, [("b",)]),
        ((A, B, module("c", 1.0, 0.5, after="b", mib=1)), 1.0, []),  # the casts take more
        ((A, B, module("c", 0.4, 1.0, after="b", mib=1), D), 0.15, [("b", "c")]),  # no cast between these two
        ((module("conv", 0.9, 1.0), module("relu", 0.8, 0.4, "follows", after="conv")), 0.0, []),
        (LAYERS, 0.0, [tuple(f"layer.{i}" for i in range(4))]),  # of one kind
    ],
)
def test_what_is_faster_in_fp32_with_its_casts_is_kept_there(
    modules: Sequence[ModuleSensitivity], cast_ms: float, kept: list[tuple[str, ...]]
) -> None:
    assert savings_in_order(sensed(*modules, cast_ms_per_mib=cast_ms), "bf16") == kept


def subject_of(sensitivity: Sensitivity) -> Subject:
    modules = (Module(path=one.path, types=(one.path.title(), "Module")) for one in sensitivity.modules)
    return replace(SUBJECT, leaves=(), modules=tuple(modules))


@pytest.mark.parametrize("workload", ["vgg16", "conv1"])
def test_every_rung_of_the_ladder_covers_the_ones_below_and_says_what_each_rule_saves(workload: str) -> None:
    """A memory format that was not timed has none."""
    sensitivity = recorded(workload)
    subject = subject_of(sensitivity)
    ladder = ladder_by_time(subject, {"contiguous": sensitivity})
    below: set[str] = set()
    height = len(ladder.timed["bf16", "contiguous"])
    for depth in range(1, height + 1):
        rules = ladder.rules(depth, "bf16", "contiguous")
        assert all(rule.reason is not None and rule.reason.saves_ms is not None for rule in rules)
        paths = [module.path for module in subject.modules]
        covered = {path for rule in rules for path in covered_by(rule, paths, subject.modules)}
        assert covered > below
        below = covered
    assert ladder.rules(0, "bf16", "contiguous") == ladder.rules(1, "bf16", "channels_last") == ()
    assert ladder.rules(99, "bf16", "contiguous") == ladder.rules(height, "bf16", "contiguous")
