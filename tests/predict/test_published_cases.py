"""Published cases as tests of direction (reports/published/cases.csv has their figures and sources)."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import pytest

from amptune.predict.gpu_table import gpus_named
from amptune.predict.operation import StepFigures
from amptune.predict.prediction import predicted
from amptune.predict.roofline import step_seconds
from amptune.predict.shape_pass import follow_step
from amptune.predict.speed_up import PAYS_FROM, StepSetting, calibration, half_speed_up, verdict_of
from amptune.workload.zoo import workload

PUBLISHED = Path(__file__).resolve().parents[2] / "reports" / "published"
CASES = list(csv.DictReader((PUBLISHED / "cases.csv").read_text().splitlines()))


@cache
def followed(name: str) -> StepFigures:
    return follow_step(workload(name))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['gpu']}-{case['workload']}-{case['memory_format']}")
def test_a_published_case_is_not_contradicted(case: dict[str, str]) -> None:
    (gpu,) = gpus_named(case["gpu"])
    setting = StepSetting(channels_last=case["memory_format"] == "channels_last")
    verdict = verdict_of(half_speed_up(followed(case["workload"]), gpu, setting))
    assert verdict != ("does not" if float(case["half_over_fp32"]) > PAYS_FROM else "pays")


def test_the_single_convolution_on_a_v100_wants_channels_last() -> None:
    """0.84 ms with it and 1.49 ms without."""
    gain = predicted(followed("conv1"), gpus_named("V100")[0], StepSetting()).channels_last
    assert gain is not None
    assert gain.ratio.middle > PAYS_FROM


def test_an_a100_is_faster_than_a_v100_under_amp_by_what_was_published() -> None:
    """1.3 to 2.5 times (PyTorch's blog on AMP)."""
    seconds = [
        step_seconds(followed("resnet18").half, gpu, calibration().efficiency, fp32_math="stock", channels_last=True)
        for gpu in gpus_named("V100,A100")
    ]
    assert 1.3 < seconds[0] / seconds[1] < 2.5


def test_scores_are_those_of_what_is_installed() -> None:
    scores = json.loads((PUBLISHED / "scores.json").read_text())
    installed = calibration().efficiency
    assert scores["efficiency"] == {name: getattr(installed, name) for name in scores["efficiency"]}
    assert scores["scores"]["same_kind"]["held"] >= 0.9
