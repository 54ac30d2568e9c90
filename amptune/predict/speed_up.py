"""Speed-ups on a GPU, as ranges, and the verdict that a range gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from amptune.policy.settings import Fp32Math
from amptune.policy.yaml_text import read
from amptune.predict.gpu_table import GpuModel
from amptune.predict.operation import StepFigures
from amptune.predict.roofline import Efficiency, step_seconds

__all__ = [
    "PAYS_FROM",
    "Calibration",
    "Known",
    "Range",
    "StepSetting",
    "Verdict",
    "calibration",
    "half_speed_up",
    "modelled",
    "relation",
    "transfer_name",
    "verdict_of",
]

Verdict = Literal["pays", "unclear", "does not"]

PAYS_FROM = 1.05  # a gain below 5 % is not worth a change of precision
_SURE = 0.9  # how likely a verdict must be
_FAR_LESS = 0.7  # of the modelled speed-up: outside the range that shapes alone give
_COVERED = 0.9  # the share of true values that a range is to hold
_REACH = NormalDist().inv_cdf((1 + _COVERED) / 2)  # of a range to either side, in standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A predicted ratio: its middle, and the ends between which nine of ten true ones should lie."""

    low: float
    middle: float
    high: float

    @classmethod
    def around(cls, middle: float, spread: float) -> Range:
        """Returns the range for a standard deviation of the ratio's logarithm."""
        reach = math.exp(_REACH * spread)
        return cls(low=middle / reach, middle=middle, high=middle * reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """How training runs: its FP32 operations, its memory format, and the batch size under half precision."""

    fp32_math: Fp32Math = "stock"
    channels_last: bool = False
    half_batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The speed-up of half precision that was measured on another GPU, in the same setting.

    The batch sizes are those of that measurement, in FP32 and in half, if they were others.
    """

    gpu: GpuModel
    speed_up: float
    batch_sizes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Numbers that were fitted to published and own measurements.

    `transfer` is the share of the error on a known GPU that is expected on another, `spread` the standard deviation of
    the logarithm of true over predicted: from shapes alone, and for each relation to the GPU that is known.
    """

    efficiency: Efficiency
    transfer: Mapping[str, float]
    spread: Mapping[str, float]


@cache
def calibration() -> Calibration:
    """Returns what `reports/published.py --fit` wrote."""
    data = read(Path(__file__).with_name("fitted.yaml")).data
    return Calibration(efficiency=Efficiency(**data["efficiency"]), transfer=data["transfer"], spread=data["spread"])


def half_speed_up(
    step: StepFigures,
    gpu: GpuModel,
    setting: StepSetting,
    known: Known | None = None,
    fitted: Calibration | None = None,
) -> Range:
    """Returns samples a second in half precision over FP32."""
    fitted = fitted or calibration()
    middle = modelled(step, gpu, setting, fitted.efficiency)
    if known is None:
        return Range.around(middle, fitted.spread["shapes"])
    how = relation(known.gpu, gpu)
    if known.batch_sizes:
        step, setting = step.at(known.batch_sizes[0]), replace(setting, half_batch_size=known.batch_sizes[1])
    error = known.speed_up / modelled(step, known.gpu, setting, fitted.efficiency)
    return Range.around(middle * error ** fitted.transfer[transfer_name(how, error)], fitted.spread[how])


def relation(known: GpuModel, gpu: GpuModel) -> str:
    """Returns `same_kind`, `same_features` (both have tensor cores, or TF32, or neither has) or `other_features`."""
    if known.kind == gpu.kind:
        return "same_kind"
    features = [(one.half is None, one.tf32 is None) for one in (known, gpu)]
    return "same_features" if features[0] == features[1] else "other_features"


def transfer_name(how: str, error: float) -> str:
    """Returns the name of the transfer of an error: far less than modelled is a cause that shapes do not show."""
    return f"{how}_slower" if error < _FAR_LESS else how


def modelled(step: StepFigures, gpu: GpuModel, setting: StepSetting, efficiency: Efficiency) -> float:
    """Returns the speed-up of half precision as the roofline has it."""
    wider = step.at(setting.half_batch_size) if setting.half_batch_size else step
    seconds = [
        step_seconds(work, gpu, efficiency, fp32_math=setting.fp32_math, channels_last=setting.channels_last)
        for work in (step.fp32, wider.half)
    ]
    return seconds[0] / seconds[1] * wider.batch_size / step.batch_size


def verdict_of(ratio: Range) -> Verdict:
    """Returns `pays` or `does not` if that is at least 90 % likely in a log-normal distribution of that range."""
    spread = math.log(ratio.high / ratio.low) / (2 * _REACH)
    likely = 1 - NormalDist(math.log(ratio.middle), spread).cdf(math.log(PAYS_FROM))
    return "pays" if likely >= _SURE else "does not" if likely <= 1 - _SURE else "unclear"
