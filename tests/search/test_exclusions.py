"""Which modules are kept in FP32 first, by times that were taken on an H200, drawn, or told by a landscape."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.landscape import WORKLOADS, landscape_of
from simulated.recorded import RecordedEvaluator

from amptune.measure.results.half_effects import ModuleSensitivity, Sensitivity
from amptune.measure.results.subject import Module, Subject
from amptune.policy.serialization import adapter_for
from amptune.policy.settings import Fp32Rule, HalfRule, MemoryFormat, amp_recipe
from amptune.search.space.exclusions import Ladder, Price, ladder_by_time
from amptune.search.space.module_rules import covered_by

SUBJECT = RecordedEvaluator("resnet50").prepare(1.0).subject
LAYOUT: MemoryFormat = "contiguous"


@cache
def recorded(workload: str) -> Sensitivity:
    """As `amptune.measure.modules.sensitivity_pass` gave it on an H200, torch 2.11, FP32 in TF32, contiguous."""
    content = json.loads((Path(__file__).parent / "h200_sensitivity.json").read_text())
    found: Sensitivity = adapter_for(Sensitivity).validate_python(content[workload])
    return found


def subject_of(sensitivity: Sensitivity) -> Subject:
    modules = (Module(path=one.path, types=(one.path.title(), "Module")) for one in sensitivity.modules)
    return replace(SUBJECT, leaves=(), modules=tuple(modules))


TIMES = st.floats(0.01, 5.0)
MODULES = st.builds(
    ModuleSensitivity,
    path=st.just(""),
    calls=st.just(1),
    fp32_ms=TIMES | st.none(),
    half_ms=st.fixed_dictionaries({"bf16": TIMES}),
    stream=st.sampled_from(["half", "follows", "fp32"]),
    input_bytes=st.integers(0, 10**6),
    output_bytes=st.integers(0, 10**6),
)


def in_a_chain(modules: list[ModuleSensitivity]) -> Sensitivity:
    named = (replace(one, path=f"m{number}") for number, one in enumerate(modules))
    return Sensitivity(modules=tuple(named), cast_ms_per_byte=1e-6)


CHAINS = st.lists(MODULES, min_size=1, max_size=8).map(in_a_chain)


@given(CHAINS | st.sampled_from(["vgg16", "conv1"]).map(recorded))
def test_every_rung_covers_the_ones_below_and_saves_more_than_they_do(sensitivity: Sensitivity) -> None:
    """Each rule says what it saves, each rung what all of its rules do. A layout that was not timed has no rung."""
    subject, price = subject_of(sensitivity), Price(sensitivity, "bf16")
    ladder = ladder_by_time(subject, {LAYOUT: sensitivity})
    below: frozenset[str] = frozenset()
    height = len(ladder.timed["bf16", LAYOUT])
    for depth in range(1, height + 1):
        rules = ladder.rules(depth, "bf16", LAYOUT)
        assert all(rule.reason is not None and rule.reason.saves_ms is not None for rule in rules)
        paths = [module.path for module in subject.modules]
        covered = frozenset(path for rule in rules for path in covered_by(rule, paths, subject.modules))
        assert covered > below
        assert ladder.saves_ms(depth, "bf16", LAYOUT) == price.saved(covered) > price.saved(below)
        below = covered
    assert ladder.rules(0, "bf16", LAYOUT) == ladder.rules(1, "bf16", "channels_last") == ()
    assert ladder.saves_ms(0, "bf16", LAYOUT) == ladder.saves_ms(1, "bf16", "channels_last") == 0
    assert ladder.rules(99, "bf16", LAYOUT) == ladder.rules(height, "bf16", LAYOUT)
    assert ladder.saves_ms(99, "bf16", LAYOUT) == ladder.saves_ms(height, "bf16", LAYOUT)


def test_without_times_nothing_is_kept_in_fp32_for_speed() -> None:
    assert ladder_by_time(SUBJECT, {}) == Ladder()
    assert Ladder().rules(1, "bf16", LAYOUT) == ()


def test_modules_that_output_fp32_may_run_in_half_but_the_last_and_that_saves_the_casts_behind_them() -> None:
    def module(path: str, stream: str) -> ModuleSensitivity:
        return ModuleSensitivity(
            path=path, calls=1, fp32_ms=2.0, half_ms={"bf16": 1.0}, stream=stream, input_bytes=10**6, output_bytes=0  # type: ignore[arg-type]
        )  # fmt: skip

    streams = {"first": "half", "norm": "fp32", "second": "half", "last_norm": "fp32"}
    sensitivity = in_a_chain([])
    sensitivity = replace(sensitivity, modules=tuple(module(path, stream) for path, stream in streams.items()))
    ladder = ladder_by_time(subject_of(sensitivity), {LAYOUT: sensitivity})
    assert ladder.half == (HalfRule(path="norm"),) == ladder.half_beside([Fp32Rule(path="head")])
    assert ladder.half_beside([Fp32Rule(path="norm")]) == (), "what stays in FP32 does not run in half too"
    assert ladder.half_saves["bf16", LAYOUT] == pytest.approx(2 * 1.5 * 10**6 * 1e-6), "a cast each way"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_simulated_machine_saves_what_its_modules_times_say(workload: str) -> None:
    """Each module by itself: together they save a little less, for a step that is shorter has less to save."""
    landscape = landscape_of(workload)
    recipe = amp_recipe("bf16", fp32_math="tf32")
    ladder = ladder_by_time(landscape.prepared.subject, {LAYOUT: landscape.sensed(LAYOUT, ("bf16", "fp16"))})
    saved_ms = landscape.true_ms(amp_recipe("bf16")) - landscape.true_ms(
        replace(recipe, fp32_modules=ladder.rules(1, "bf16", LAYOUT))
    )
    assert saved_ms == pytest.approx(ladder.saves_ms(1, "bf16", LAYOUT))
    assert saved_ms > 0
