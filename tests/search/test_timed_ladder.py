"""The ladder by measured times: measured once for a study, whatever is pinned, and no other study by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from simulated.recorded import RecordedEvaluator
from test_exclusions import recorded

from amptune.measure.results.half_effects import Half, Sensitivity
from amptune.measure.results.subject import Module, Prepared
from amptune.policy.settings import STOCK, Policy
from amptune.search.groundwork import FILE, Modules
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.space.knobs import restrict


@dataclass
class Timed(RecordedEvaluator):
    """Gives the times that VGG16's modules took on an H200, whatever the layout."""

    sensed: list[Policy] = field(default_factory=list)

    def prepare(self, limit_s: float) -> Prepared:
        prepared = super().prepare(limit_s)
        modules = tuple(Module(path=one.path, types=("Any", "Module")) for one in recorded("vgg16").modules)
        return replace(prepared, subject=replace(prepared.subject, modules=modules))

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity:  # noqa: ARG002
        self.sensed.append(policy)
        return recorded("vgg16")


def times_in(folder: Path, evaluator: Timed, layouts: Sequence[str] = ("contiguous", "channels_last")) -> object:
    """Times the modules in these layouts if they have to be timed, and returns the ladder."""
    prepared = evaluator.prepare(1.0)
    space = candidates_for(prepared, Wanted(baseline=STOCK, pins={})).space
    space = restrict(space, "memory_format", tuple(layouts))
    modules = Modules(evaluator, prepared, space, folder, timed=lambda: None, trial_s=lambda: 4.0)
    step = modules.wants(60.0)
    assert modules.are_open == (step is not None)
    if step is not None:
        assert modules.wants(step.seconds + 3.9) is None, "time for a trial behind is needed"
        modules.take(step, 60.0)
    assert modules.wants(60.0) is None
    return modules.ladder()


def test_times_are_measured_once_for_a_study_and_what_a_pin_left_out_later(tmp_path: Path) -> None:
    """Every layout with TF32 for what stays in FP32."""
    evaluator = Timed("vgg16_cifar")
    times_in(tmp_path, evaluator, ["channels_last"])
    again = times_in(tmp_path, evaluator)
    assert again is not None
    assert evaluator.sensed == [
        Policy(fp32_math="tf32", memory_format=layout) for layout in ("channels_last", "contiguous")
    ]
    assert times_in(tmp_path, evaluator) == again
    assert len(evaluator.sensed) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"key": 3}', '{"key": "KEY", "sensed": []}'])
def test_a_file_that_is_none_of_ours_is_measured_anew(tmp_path: Path, content: str) -> None:
    evaluator = Timed("vgg16_cifar")
    times_in(tmp_path, evaluator)
    key = json.loads((tmp_path / FILE).read_text())["key"]
    (tmp_path / FILE).write_text(content.replace("KEY", key))
    assert times_in(tmp_path, evaluator) is not None
    assert len(evaluator.sensed) == 4
