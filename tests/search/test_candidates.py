"""What a search may try on a model and a machine: every point as a policy, and what a pin makes of the space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.recorded import RecordedEvaluator

from amptune.errors import SpaceError
from amptune.measure.results.subject import Module
from amptune.policy.settings import STOCK, Float8Rule, Fp32Rule, HalfRule, Policy, Reason, amp_recipe
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.exclusions import Ladder
from amptune.search.space.knobs import Point, points, reason_against
from amptune.search.space.space_file import load_space, space_names

PARTS = {"": "Block", ".narrow": "Linear", ".mlp": "Mlp", ".mlp.up": "Linear", ".mlp.down": "Linear"}
MODULES = (
    Module(path="layers", types=("ModuleList", "Module"), runs=False),
    *(Module(path=f"layers.{n}{path}", types=(kind, "Module")) for n in range(3) for path, kind in PARTS.items()),
    Module(path="head", types=("Linear", "Module")),
)
BLOCKS = tuple(f"layers.{n}" for n in range(3))
MODEL = {
    "modules": MODULES,
    "blocks": BLOCKS,
    "wide_linears": tuple(f"{block}.mlp.{name}" for block in BLOCKS for name in ("up", "down")),
    "repeated_leaves": 4,
}
ALL, ALTERNATE, FLOAT8 = ("layers",), ("layers.0", "layers.2"), (Float8Rule(type="Mlp"),)
O2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
PLAIN = (("cudnn_benchmark", "false"), ("fp32_exclusions", "0"), ("memory_format", "contiguous"))


@cache
def candidates(
    space: str = "hopper",
    *pins: tuple[str, str],
    saves_memory: bool = False,
    devices: int = 1,
    of_model: tuple[tuple[str, Any], ...] = tuple(MODEL.items()),
    half: tuple[HalfRule, ...] = (),
) -> Candidates:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    prepared = replace(prepared, subject=replace(prepared.subject, **dict(of_model)), devices=devices)
    wanted = Wanted(baseline=STOCK, space=space, pins=dict(pins), saves_memory=saves_memory)
    return candidates_for(prepared, wanted, Ladder(half=half) if half else None)


def starts(space: str, sizes: tuple[int, ...] = (), **model: Any) -> tuple[Policy, ...]:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    prepared = replace(prepared, subject=replace(prepared.subject, **model))
    wanted = Wanted(baseline=STOCK, space=space, pins={}, batch_size="auto" if sizes else None)
    return candidates_for(prepared, wanted, sizes=sizes).starts


def policies(of: Candidates) -> list[Policy]:
    return [of.policy_of(point) for point in points(of.space)]


@settings(max_examples=150, deadline=None)
@given(
    space=st.sampled_from(space_names()),
    saves_memory=st.booleans(),
    devices=st.integers(1, 2),
    knob=st.sampled_from(["autocast", "memory_format", "cudnn_benchmark", "fused_optimizer"]),
    data=st.data(),
)
def test_what_is_allowed_runs_together_and_a_pin_leaves_what_has_its_value(
    space: str, saves_memory: bool, devices: int, knob: str, data: st.DataObject
) -> None:
    of: dict[str, Any] = {"saves_memory": saves_memory, "devices": devices}
    tried = candidates(space, **of)
    point = Point({one.name: data.draw(st.sampled_from(one.choices)) for one in tried.space.knobs})
    if reason_against(point, tried.space.forbid) is not None:
        return
    policy = tried.policy_of(point)
    assert tried.allows(policy)
    assert not policy.float8_modules or (policy.autocast == "bf16" and policy.compile != "off")
    recorded = ("off", "blocks", *(("default", "step") if policy.cuda_graphs == "step" else ()))
    assert not policy.cuda_graphs or (policy.compile in recorded and devices == 1 and not policy.checkpoint)
    assert policy.weights == "fp32" or policy.recipe == O2
    assert not policy.checkpoint or saves_memory
    value = data.draw(st.sampled_from(tried.space.choices(knob) or (None,)))
    if value is not None:
        assert candidates(space, (knob, str(value).lower()), **of).allows(policy) == (getattr(policy, knob) == value)


@pytest.mark.parametrize(
    ("space", "pins", "of", "setting", "values"),
    [
        ("cpu", {}, {"saves_memory": True}, "checkpoint", {(), ALTERNATE, ALL}),
        ("cpu", {}, {}, "checkpoint", {()}),
        ("cpu", {}, {"saves_memory": True, "of_model": ()}, "checkpoint", {()}),
        ("cpu", {"checkpoint": "all"}, {}, "checkpoint", {ALL}),
        *((space, {"autocast": "bf16"}, {}, "float8_modules", {(), FLOAT8}) for space in ("ada", "hopper")),
        ("ampere", {"autocast": "bf16"}, {}, "float8_modules", {()}),
        ("hopper", {"autocast": "bf16"}, {"of_model": ()}, "float8_modules", {()}),
        ("hopper", {"autocast": "bf16", "float8_modules": "wide"}, {}, "float8_modules", {FLOAT8}),
        *((space, {}, {}, "weights", {"fp32", "half"}) for space in ("maxwell", "pascal-6.0", "turing", "volta")),
        ("hopper", {"weights": "half"}, {}, "recipe", {O2}),
        (
            "hopper",
            {"weights": "half", "master_weights": "false", "keep_batchnorm_fp32": "off"},
            {},
            "recipe",
            {Policy(weights="half")},
        ),
        ("hopper", {}, {}, "cuda_graphs", {False, True, "step"}),
        ("hopper", {}, {"devices": 2}, "cuda_graphs", {False}),
        ("hopper", {}, {"of_model": (("fusable", False),)}, "fused_optimizer", {False}),
    ],
)
def test_a_search_tries_what_may_pay_on_this_machine_and_model_and_what_is_pinned(
    space: str, pins: Mapping[str, str], of: dict[str, Any], setting: str, values: set[Any]
) -> None:
    found = candidates(space, *pins.items(), *PLAIN, **of)
    assert {getattr(policy, setting) for policy in policies(found)} == values
    if ALL in values:
        assert ALL in {policy.checkpoint for policy in found.starts}, "it takes the least memory"


@pytest.mark.parametrize(
    ("pins", "of", "words"),
    [
        ({"checkpoint": "some"}, {"saves_memory": True}, "checkpoint=some: 'some' is not one of none, alternate, all"),
        (
            {"checkpoint": "all"},
            {"of_model": ()},
            "checkpoint=all is for repeated blocks, and the model has none",
        ),
        ({"float8_modules": "wide"}, {"of_model": ()}, "--set float8_modules=wide is for Linears of 4096 × 2048"),
        ({"weights": "half", "autocast": "fp16"}, {}, "weights=half and --set autocast=fp16 contradict each other"),
        ({"weights": "fp32", "master_weights": "true"}, {}, "master_weights=true means nothing for FP32 weights"),
        ({"cuda_graphs": "on"}, {"devices": 2}, "--set cuda_graphs=on cannot be measured over several devices"),
    ],
)
def test_a_pin_that_cannot_be_kept_is_refused(pins: Mapping[str, str], of: dict[str, Any], words: str) -> None:
    with pytest.raises(SpaceError, match=words):
        candidates("hopper", *pins.items(), **of)


def test_a_study_is_the_same_for_every_objective_and_another_by_a_pin_or_a_device_more() -> None:
    whole = candidates("cpu").study_name
    assert candidates("cpu", saves_memory=True).study_name == whole
    others = candidates("cpu", ("checkpoint", "all")), candidates("cpu", devices=2)
    assert whole not in {one.study_name for one in others}


def test_what_half_weights_need_stays_in_fp32_in_all_of_them_and_what_nothing_cures_is_not_tried() -> None:
    rule = Fp32Rule(path="fc", reason=Reason(risk=9.0))
    tried = candidates("volta")
    assert tried.halves_alone == (amp_recipe("fp16"), O2)
    cured = policies(tried.guarded({"half": (rule,)}))
    assert {policy.fp32_modules for policy in cured if policy.weights == "half"} == {(rule,)}
    assert all(rule not in policy.fp32_modules for policy in cured if policy.weights == "fp32")
    assert {policy.weights for policy in policies(tried.guarded({"half": None}))} == {"fp32"}


NORM = HalfRule(type="LayerNorm")
IN_HALF = replace(amp_recipe("bf16"), half_modules=(NORM,))


@pytest.mark.parametrize(
    ("found", "policy", "allowed"),
    [
        (candidates("volta"), STOCK, True),
        (candidates("volta"), O2, True),
        (candidates("volta"), Policy(weights="half"), False),
        (candidates("hopper", ("weights", "half")), amp_recipe("fp16"), False),
        (candidates("cpu", saves_memory=True), Policy(checkpoint=ALL), True),
        (candidates("cpu", ("checkpoint", "none")), Policy(checkpoint=ALL), False),
        (candidates("cpu", saves_memory=True), Policy(checkpoint=("head",)), False),
        (candidates("hopper", half=(NORM,)), IN_HALF, True),
        (candidates("hopper", ("half_modules", "false"), half=(NORM,)), IN_HALF, False),
    ],
)
def test_a_policy_of_ones_own_is_allowed_where_its_settings_are_choices(
    found: Candidates, policy: Policy, *, allowed: bool
) -> None:
    assert found.allows(policy) is allowed


# --- the order ---------------------------------------------------------------------------------------------------

PICTURES: dict[str, Any] = {"convolution_dims": frozenset({2})}
TEXT: dict[str, Any] = {"convolution_dims": frozenset()}
PINS = (("autocast", "off"), ("fused_optimizer", "true"), ("fp32_math", "tf32"), ("cuda_graphs", "true"))
VIDEO: dict[str, Any] = {"convolution_dims": frozenset({3})}


@settings(max_examples=60, deadline=None)
@given(
    space=st.sampled_from(space_names()),
    dims=st.sampled_from([PICTURES, TEXT, VIDEO]),
    fusable=st.booleans(),
    threads=st.sampled_from([0, 1, 2, 64]),
    pins=st.sampled_from([(), *((pin,) for pin in PINS)]),
)
def test_each_start_stands_once_is_allowed_and_matters_and_what_everybody_tries_is_among_them(
    space: str, dims: dict[str, Any], fusable: bool, threads: int, pins: tuple[tuple[str, str], ...]
) -> None:
    model = {**dims, "fusable": fusable, "threads": threads}
    pins = tuple((name, value) for name, value in pins if load_space(space).choices(name))  # a CPU has no CUDA graphs
    found = candidates(space, *pins, of_model=tuple(model.items()))
    order = found.starts
    assert len(order) == len(set(order))
    assert STOCK not in order, "it is the baseline"
    assert set(found.known_good) <= {STOCK, *order}
    for policy in set(order) - set(found.known_good):
        assert found.allows(policy)
        assert policy.memory_format == "contiguous" or dims is not TEXT
        assert not policy.fused_optimizer or fusable or pins == (("fused_optimizer", "true"),)
        assert policy.threads < max(threads, 1)
    if not pins:
        assert len(found.space.try_first) >= 2


@pytest.mark.parametrize("space", ["ampere", "ada", "hopper", "blackwell", "volta", "turing"])
@pytest.mark.parametrize(("model", "layout"), [(PICTURES, "channels_last"), (VIDEO, "channels_last_3d"), (TEXT, None)])
def test_tensor_cores_get_both_graphs_of_one_dtype_first_whatever_the_model_reads(
    space: str, model: dict[str, Any], layout: str | None
) -> None:
    """Then recordings, which need no compiler: of whole steps, and of passes. One line is for all kinds of models.

    Where training makes the call, the loss is compiled too, and the whole step recorded.
    """
    half = "fp16" if space in ("volta", "turing") else "bf16"
    plain = Policy(autocast=half, memory_format=layout or "contiguous", fused_optimizer=True)  # type: ignore[arg-type]
    reduced, default, of_step = (replace(plain, compile=mode) for mode in ("reduce-overhead", "default", "step"))
    whole, passes = (replace(plain, cuda_graphs=what) for what in ("step", True))
    of_whole = replace(of_step, cuda_graphs="step")
    assert starts(space, **model)[:5] == (reduced, of_whole, of_step, whole, passes)
    assert starts(space, **model, own_loop=False)[:3] == (reduced, passes, default)
    assert starts(space, **model, own_step=True)[:4] == (reduced, whole, default, passes)
    assert plain in starts(space, **model)


def test_blocks_come_behind_both_whole_graphs_and_the_other_dtype_behind_them() -> None:
    compiled = [policy for policy in starts("hopper", **TEXT, repeated_leaves=4) if policy.compile != "off"]
    assert [(policy.autocast, policy.compile) for policy in compiled[:5]] == [
        ("bf16", "reduce-overhead"),
        ("bf16", "step"),
        ("bf16", "step"),
        ("bf16", "blocks"),
        ("fp16", "reduce-overhead"),
    ]


@pytest.mark.parametrize(("space", "leading"), [("cpu", "off"), ("cpu-bf16", "bf16")])
def test_a_cpu_tries_layout_optimizer_and_fewer_threads_and_bf16_first_or_last_by_what_it_can(
    space: str, leading: str
) -> None:
    order = starts(space, **PICTURES, threads=2)
    plain = Policy(memory_format="channels_last", fused_optimizer=True)
    assert order[0] == replace(plain, autocast=leading)  # type: ignore[arg-type]
    assert {plain, replace(plain, threads=1)} <= set(order[:4])
    if leading == "off":
        assert [policy.autocast for policy in order] == ["off"] * (len(order) - 2) + ["bf16", "bf16"], "its recipes"


def test_the_leading_recipes_are_tried_in_larger_batches_too_if_these_are_searched() -> None:
    order = starts("hopper", sizes=(64, 256, 512, 1024, 2048), **TEXT)
    larger = [policy for policy in order if policy.batch_size != 128]
    place = order.index(larger[0])
    assert order[place : place + len(larger)] == tuple(larger)
    assert [policy.compile for policy in order[:place]].count("off") == 2, "behind the two leading ones"
    assert {policy.batch_size for policy in larger} == {1024, 256}
    assert all(policy.compile == "off" for policy in larger)
    eager = next(policy for policy in order if policy.compile == "off")
    assert {STOCK, replace(eager, batch_size=None)} <= {replace(policy, batch_size=None) for policy in larger}
