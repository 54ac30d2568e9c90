"""The ladder by measured times: measured once for a study, whatever is pinned, and no other study by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from simulated.recorded import RecordedEvaluator
from test_exclusion_savings import recorded
from test_pipeline import tuned_on

from amptune.errors import StudyError
from amptune.measure.results.half_effects import Half, Sensitivity
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Module, Prepared
from amptune.policy.settings import STOCK, HalfRule, Policy, amp_recipe
from amptune.search.groundwork import FILE, Modules
from amptune.search.sampler.study import open_study
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.space.exclusions import Ladder
from amptune.search.space.knobs import Space, restrict, with_knob


@dataclass
class Timed(RecordedEvaluator):
    """Gives the times that VGG16's modules took on an H200, whatever the layout. One returns FP32 if it is `wide`."""

    sensed: list[Policy] = field(default_factory=list)
    fails: bool = False
    wide: str | None = None

    def prepare(self, limit_s: float) -> Prepared:
        prepared = super().prepare(limit_s)
        modules = tuple(Module(path=one.path, types=("Any", "Module")) for one in recorded("vgg16").modules)
        return replace(prepared, subject=replace(prepared.subject, modules=modules))

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity | Failure:
        if self.fails:
            return super().sense(policy, dtypes, limit_s)
        self.sensed.append(policy)
        modules = [replace(m, stream="fp32") if m.path == self.wide else m for m in recorded("vgg16").modules]
        return replace(recorded("vgg16"), modules=tuple(modules))


def ladder_in(folder: Path, evaluator: Timed, *, layouts: Sequence[str] = ()) -> Ladder | None:
    prepared = evaluator.prepare(1.0)
    space = candidates_for(prepared, Wanted(baseline=STOCK, pins={})).space
    modules = modules_of(evaluator, cut(space, layouts), prepared, folder)
    step = modules.wants(60.0)
    assert modules.are_open == (step is not None)
    if step is not None:
        modules.take(step, 60.0)
    assert modules.wants(60.0) is None
    return modules.ladder()


def modules_of(evaluator: Timed, space: Space, prepared: Prepared, folder: Path, *, trial_s: float = 1.0) -> Modules:
    return Modules(evaluator, prepared, space, folder, timed=lambda: None, trial_s=lambda: trial_s)


def cut(space: Space, layouts: Sequence[str]) -> Space:
    return restrict(space, "memory_format", tuple(layouts)) if layouts else space


def test_times_are_measured_once_for_a_study_and_what_a_pin_left_out_later(tmp_path: Path) -> None:
    """Every layout with TF32 for what stays in FP32."""
    evaluator = Timed("vgg16_cifar")
    ladder_in(tmp_path, evaluator, layouts=["channels_last"])
    again = ladder_in(tmp_path, evaluator)
    assert again is not None
    assert any(again.timed.values())
    assert evaluator.sensed == [
        Policy(fp32_math="tf32", memory_format=layout) for layout in ("channels_last", "contiguous")
    ]
    assert ladder_in(tmp_path, evaluator) == again
    assert len(evaluator.sensed) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"key": 3}', '{"key": "KEY", "sensed": []}'])
def test_a_file_that_is_none_of_ours_is_measured_anew(tmp_path: Path, content: str) -> None:
    evaluator = Timed("vgg16_cifar")
    ladder_in(tmp_path, evaluator)
    key = json.loads((tmp_path / FILE).read_text())["key"]
    (tmp_path / FILE).write_text(content.replace("KEY", key))
    assert ladder_in(tmp_path, evaluator) is not None
    assert len(evaluator.sensed) == 4


# --- one study, whatever the ladder and the gate said --------------------------------------------------------------


def test_another_ladder_is_the_same_study_and_its_savings_stand_in_the_rules(tmp_path: Path) -> None:
    """Where no module can be timed, the search goes by intensity."""
    first, _ = tuned_on(Timed("vgg16_cifar", fails=True), tmp_path)
    assert first.speedup.value > 1
    evaluator = Timed("vgg16_cifar")
    decision, _ = tuned_on(evaluator, tmp_path, trials=10)
    rules = [rule for policy in evaluator.measured for rule in policy.fp32_modules if str(rule) == "avgpool"]
    assert rules
    assert rules[0].reason is not None
    assert (rules[0].reason.saves_ms or 0) > 10
    assert len(decision.trials) > 20
    assert sum(trial.policy == STOCK for trial in decision.trials) == 1


# --- half --------------------------------------------------------------------------------------------------------


def test_what_autocast_keeps_in_fp32_is_tried_in_half_and_can_be_pinned() -> None:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    norm = HalfRule(type="LayerNorm")
    ladder = Ladder(half=(norm,))
    tried = candidates_for(prepared, Wanted(baseline=STOCK, pins={}), ladder)
    assert tried.space.choices("half_modules") == (False, True)
    in_half = replace(amp_recipe("bf16"), half_modules=(norm,))
    assert tried.allows(in_half)
    pinned = candidates_for(prepared, Wanted(baseline=STOCK, pins={"half_modules": "false"}), ladder)
    assert not pinned.allows(in_half)
    point = next(point for point in tried.space.try_first if point["autocast"] == "bf16")
    assert tried.policy_of(point).half_modules == ()


def test_a_storage_that_never_gives_what_it_was_asked_for_ends_the_search(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")
    candidates = candidates_for(evaluator.prepare(1.0), Wanted(baseline=STOCK, pins={}))
    study = open_study(tmp_path, "a", candidates.space, candidates.policy_of, seed=0)
    study.adopt(with_knob(candidates.space, "batch_size", (32, 64), stock=32), candidates.policy_of)
    with pytest.raises(StudyError, match="none of the policies"):
        study.suggest()
