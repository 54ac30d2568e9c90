"""CUDA graphs in the search: when they are measured, and what the rest of it takes them for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated.recorded import RecordedEvaluator

from amptune.errors import SpaceError
from amptune.policy.settings import STOCK, Policy
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import Point, points
from amptune.search.space.space_file import load_space, space_names


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
