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
from amptune.predict.operation import Step
from amptune.predict.roofline import Efficiency
from amptune.predict.speed_up import Calibration, modelled

GPUS: Mapping[str, GpuModel] = {gpu.name: gpu for gpu in gpu_models()}

# Where a fit starts, and the factor by which a value goes up or down at little cost: what data sheets are known to give.
START = Efficiency(
    fp32=0.75, tf32=0.55, half=0.5, convolution=0.8, grouped=0.3, bandwidth=0.75, plain_half=0.9, kernel_us=3.0,
    ramp_us=4.0, host_us=7.0, recurrent_us=20.0, layout=1.0,
)  # fmt: skip
LOOSE = 1.5
TRANSFER = {"same_kind": 0.9, "other_kind": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row with its step at its batch size."""

    row: Row
    step: Step

    @property
    def gpu(self) -> GpuModel:
        return GPUS[self.row.gpu]

    def modelled(self, efficiency: Efficiency, gpu: GpuModel | None = None) -> float:
        return modelled(self.step, gpu or self.gpu, self.row.setting, efficiency)


def cases_of(rows: Sequence[Row], steps: Mapping[str, Step]) -> list[Case]:
    known: dict[tuple[str, int], Step] = {}
    cases = []
    for row in rows:
        step = steps[row.workload]
        size = row.batch_size or step.batch_size
        if (row.workload, size) not in known:
            known[row.workload, size] = step.at(size)
        cases.append(Case(row=row, step=known[row.workload, size]))
    return cases


def fitted(cases: Sequence[Case], start: Efficiency = START, evaluations: int | None = None) -> Efficiency:
    """Returns the efficiencies that explain the ratios best; each GPU and model counts about as much as another."""
    names = list(asdict(START))
    prior = np.log([getattr(START, name) for name in names])
    weights = weights_of(cases)
    truth = np.log([case.row.ratio for case in cases])
    alike = {(id(case.step), case.gpu, case.row.setting): case for case in cases}  # many rows are of one GPU and batch
    places = [list(alike).index((id(case.step), case.gpu, case.row.setting)) for case in cases]

    def off(values: Any) -> Any:
        efficiency = Efficiency(**dict(zip(names, np.exp(values).tolist(), strict=True)))
        found = np.log([case.modelled(efficiency) for case in alike.values()])[places]
        return np.concatenate([weights * (found - truth), 0.3 * (values - prior) / math.log(LOOSE)])

    first = np.log([getattr(start, name) for name in names])
    done = least_squares(off, first, loss="soft_l1", f_scale=0.2, diff_step=1e-2, max_nfev=evaluations)
    return Efficiency(**{name: float(f"{math.exp(value):.4g}") for name, value in zip(names, done.x, strict=True)})


def weights_of(cases: Sequence[Case]) -> Any:
    """Returns a weight for each case: less where one model on one GPU, or one model, has many rows."""
    pairs = [(case.row.workload, case.row.gpu) for case in cases]
    models = [case.row.workload for case in cases]
    return np.array([(pairs.count(p) * models.count(m) ** 0.5) ** -0.5 for p, m in zip(pairs, models, strict=True)]) * 3
