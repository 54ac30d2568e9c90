"""Which modules are kept in FP32 first: by their arithmetic, or by times that were taken on an H200 or made up."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from simulated.recorded import BODY, HEAD, NORM, STEM, RecordedEvaluator

from amptune.measure.results.half_effects import Sensitivity
from amptune.measure.results.subject import Leaf, Module, Subject
from amptune.policy.serialization import adapter_for
from amptune.policy.settings import Fp32Rule
from amptune.search.space.exclusions import groups_by_intensity, ladder_by_time
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
