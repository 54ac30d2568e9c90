"""CUDA graphs in the search: when they are measured, and what the rest of it takes them for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated.recorded import RecordedEvaluator

from amptune.errors import SpaceError
from amptune.policy.setting_effects import memory_of, numerics_of, tensors_of
from amptune.policy.settings import STOCK, Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Judgements
from amptune.search.sampler.acquisition import features_of, with_features
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import Dimension, Point, Value, points
from amptune.search.space.space_file import load_space, space_names

GRAPHS = Policy(autocast="bf16", memory_format="channels_last", cuda_graphs=True, fused_optimizer=True)


def candidates(space: str, **pins: str) -> Candidates:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    return candidates_for(prepared, Wanted(baseline=STOCK, space=space, pins=pins))


@pytest.mark.parametrize("space", sorted(set(space_names()) - {"cpu"}))
def test_one_is_measured_right_behind_the_first_recipe_on_every_gpu_and_others_behind_the_second(space: str) -> None:
    """A second recipe is hardly faster than the first (MobileNetV3 on an H200, where it takes cuDNN 10 s to start)."""
    tried = candidates(space)
    recorded = [policy for policy in tried.soon if policy.cuda_graphs]
    assert recorded
    first, *others = tried.amp_recipes
    order = [STOCK, first, recorded[0], *others, *recorded[1:]]
    assert list(tried.soon[: len(order)]) == order
    assert set(tried.soon) <= set(tried.first)
    assert set(tried.known_good) <= set(tried.soon)


@pytest.mark.parametrize("space", sorted(space_names()))
def test_they_are_tried_on_compiled_blocks_and_never_on_a_compiled_model(space: str) -> None:
    tried = candidates(space)
    for point in points(load_space(space)):
        assert not point.get("cuda_graphs") or point["compile"] in ("off", "blocks")
    allowed_by_mistake = Point({"autocast": "bf16", "compile": "default", "cuda_graphs": True})
    assert tried.policy_of(allowed_by_mistake) == Policy(autocast="bf16", compile="default")


def test_over_several_devices_they_are_not_tried_and_cannot_be_pinned() -> None:
    over_two = replace(RecordedEvaluator("resnet50").prepare(1.0), devices=2)
    wanted = Wanted(baseline=STOCK, space="hopper", pins={})
    tried = candidates_for(over_two, wanted)
    assert not any(policy.cuda_graphs for policy in (*tried.first, *map(tried.policy_of, points(tried.space))))
    assert tried.study_name != candidates("hopper").study_name
    with pytest.raises(SpaceError, match="--set cuda_graphs=on cannot be measured over several devices"):
        candidates_for(over_two, replace(wanted, pins={"cuda_graphs": "on"}))


def test_their_numerics_are_those_of_the_kernels_they_launch() -> None:
    assert numerics_of(GRAPHS) == replace(GRAPHS, cuda_graphs=False, fused_optimizer=False)
    against_stock: Judgements[Judgement] = Judgements(STOCK)
    assert against_stock.is_exempt(Policy(cuda_graphs=True)) == against_stock.is_exempt(STOCK)


def test_their_memory_is_an_arm_of_its_own() -> None:
    assert memory_of(GRAPHS) != memory_of(replace(GRAPHS, cuda_graphs=False))
    assert tensors_of(GRAPHS) != tensors_of(replace(GRAPHS, cuda_graphs=False))


def test_a_surrogate_sees_them_in_the_modes_of_the_compiler_that_have_them() -> None:
    knobs = [
        Dimension(name="compile", choices=("off", "default", "reduce-overhead")),
        Dimension(name="cuda_graphs", choices=(False, True)),
    ]
    assert sorted(knob.name for knob in with_features(knobs)) == ["autotuned", "compile", "cuda_graphs"]
    more = [*knobs[:-1], replace(knobs[-1], choices=(False, True, "step"))]
    assert [knob.choices for knob in with_features(more) if knob.name == "cuda_graphs"] == [(False, True, "step")]
    assert features_of(Point({"compile": "off", "cuda_graphs": "step"}))["cuda_graphs"] == "step"
    recorded = features_of(Point({"compile": "off", "cuda_graphs": True}))
    compiled = features_of(Point({"compile": "reduce-overhead", "cuda_graphs": False}))
    plain = features_of(Point({"compile": "default", "cuda_graphs": False}))
    assert (recorded["cuda_graphs"], recorded["compile"]) == (True, "off")
    assert (compiled["cuda_graphs"], compiled["compile"]) == (True, "on")
    assert (plain["cuda_graphs"], plain["compile"]) == (False, "on")


def test_a_surrogate_tells_compiled_blocks_from_the_whole_model_compiled() -> None:
    def choices(*modes: str) -> tuple[Value, ...]:
        return next(
            one.choices for one in with_features([Dimension(name="compile", choices=modes)]) if one.name == "compile"
        )

    blocks = features_of(Point({"compile": "blocks", "cuda_graphs": True}))
    assert (blocks["cuda_graphs"], blocks["compile"]) == (True, "blocks")
    assert choices("off", "blocks", "default") == ("off", "blocks", "on")
    assert choices("off", "default") == ("off", "on")
