"""Fits the few efficiencies of the roofline, and how far its ratios are off, leaving one GPU out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from published_rows import Row
from scipy.optimize import least_squares

from amptune.predict.gpu_table import GpuModel, gpu_models
from amptune.predict.operation import StepFigures
from amptune.predict.roofline import Efficiency, step_seconds
from amptune.predict.speed_up import modelled

GPUS: Mapping[str, GpuModel] = {gpu.name: gpu for gpu in gpu_models()}

# Where a fit starts, and the factor by which a value may go up or down at little cost.
START = Efficiency(
    fp32=0.8, tf32=0.75, half=0.75, reuse=150.0, convolution=0.8, plain_convolution=0.7, grouped=0.3, bandwidth=0.75,
    half_bandwidth=0.9, plain_half=0.9, plain_half_convolution=0.75, kernel_us=2.0, ramp_us=3.0,
    host_us=14.0, recurrent_us=20.0, layout=2.3,
)  # fmt: skip
LOOSE = 1.5
ROBUST = 0.2  # an error beyond it counts by its size, no longer by its square
RATES = 0.5  # what an error of a rate weighs beside one of a ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row with its step at its batch size."""

    row: Row
    step: StepFigures

    @property
    def gpu(self) -> GpuModel:
        return GPUS[self.row.gpu]

    @property
    def batch_sizes(self) -> tuple[int, int]:
        return self.step.batch_size, self.row.setting.half_batch_size or self.step.batch_size

    def modelled(self, efficiency: Efficiency, gpu: GpuModel | None = None) -> float:
        return modelled(self.step, gpu or self.gpu, self.row.setting, efficiency)


def cases_of(rows: Sequence[Row], steps: Mapping[str, StepFigures]) -> list[Case]:
    known: dict[tuple[str, int], StepFigures] = {}
    cases = []
    for row in rows:
        step = steps[row.workload]
        size = row.batch_size or step.batch_size
        if (row.workload, size) not in known:
            known[row.workload, size] = step.at(size)
        cases.append(Case(row=row, step=known[row.workload, size]))
    return cases


def fitted(cases: Sequence[Case], evaluations: int = 10) -> tuple[Efficiency, dict[str, Efficiency]]:
    """Returns the efficiencies that explain the ratios best, and those without each GPU.

    Each GPU and model counts about as much as another. Without a GPU is one Gauss-Newton step from the whole's optimum,
    with the rows of the others alone.
    """
    names = list(asdict(START))
    prior = np.log([getattr(START, name) for name in names])
    weights = weights_of(cases)
    truth = np.log([case.row.ratio for case in cases])
    alike = {_alike(case): case for case in cases}  # many rows are of one GPU and batch
    place = {key: n for n, key in enumerate(alike)}
    places = [place[_alike(case)] for case in cases]

    def off(values: Any) -> Any:
        efficiency = _efficiency(names, values)
        found = np.log([case.modelled(efficiency) for case in alike.values()])[places]
        rates = np.array([_rate_error(case, efficiency) for case in alike.values()])[places]
        return np.concatenate([weights * (found - truth), RATES * weights * rates, (values - prior) / math.log(LOOSE)])

    done = least_squares(off, prior, loss="soft_l1", f_scale=ROBUST, diff_step=1e-2, max_nfev=evaluations)
    errors = off(done.x)
    robust = (1 + (errors / ROBUST) ** 2) ** -0.5  # soft_l1's weights
    gpus = np.array([case.row.gpu for case in cases])
    step = 1e-2
    slopes = np.stack([(off(done.x + step * unit) - errors) / step for unit in np.eye(len(names))], axis=1)
    without = {}
    for gpu in sorted({case.row.gpu for case in cases}):
        kept = np.concatenate([gpus != gpu, gpus != gpu, np.full(len(names), True)])
        root = np.sqrt(robust[kept])
        change, *_ = np.linalg.lstsq(root[:, None] * slopes[kept], -root * errors[kept], rcond=None)
        without[gpu] = _efficiency(names, done.x + np.clip(change, -0.5, 0.5))
    return _efficiency(names, done.x), without


def _alike(case: Case) -> tuple[Any, ...]:
    return id(case.step), case.gpu, case.row.setting, case.row.fp32_per_s


def _efficiency(names: Sequence[str], values: Any) -> Efficiency:
    return Efficiency(**{name: float(f"{math.exp(value):.4g}") for name, value in zip(names, values, strict=True)})


def _rate_error(case: Case, efficiency: Efficiency) -> float:
    """Returns the error of the FP32 step's time, where the table has it; one step a second of the own rows."""
    if case.row.fp32_per_s is None:
        return 0.0
    setting = case.row.setting
    seconds = step_seconds(
        case.step.fp32, case.gpu, efficiency, fp32_math=setting.fp32_math, channels_last=setting.channels_last
    )
    steps_per_s = case.row.fp32_per_s / (1 if case.row.table.startswith("own") else case.step.batch_size)
    return math.log(seconds * steps_per_s)


def weights_of(cases: Sequence[Case]) -> Any:
    """Returns a weight for each case: less where one model on one GPU, or one model, has many rows."""
    pairs = [(case.row.workload, case.row.gpu) for case in cases]
    models = [case.row.workload for case in cases]
    return np.array([(pairs.count(p) * models.count(m) ** 0.5) ** -0.5 for p, m in zip(pairs, models, strict=True)]) * 3
