"""A roofline for each operation of a step: it takes the longer of computing and of moving its bytes.

The model of Williams et al. (2009, doi:10.1145/1498765.1498785), with the time in which a kernel fills the GPU, and a
host that launches kernels one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from amptune.policy.settings import Fp32Math
from amptune.predict.gpu_table import GpuModel
from amptune.predict.operation import KINDS, Work

__all__ = ["Efficiency", "gpu_and_host_seconds", "step_seconds"]

_CAST_HOST = 0.4  # of an operation's host time: autocast casts in C++, without Python or a module's call
_HIDDEN = 4  # the power by which the longer of host and GPU time hides the shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the data sheets that GPUs reach, fitted by reports/published.py; a name may have a unit instead.

    `fp32`, `tf32` and `half` are of the peak rates in matrix products; `reuse`, the FLOPs that kernels get out of a
    byte of memory bandwidth, bounds these too. `convolution` is of that rate in convolutions on tensor cores,
    `plain_convolution` in others, `grouped` of the FP32 rate in grouped and depthwise ones. `plain_half` is the rate of
    fp16 without tensor cores over FP32's, `plain_half_convolution` that in convolutions. `bandwidth` is of the
    memory's, `half_bandwidth` of that for 16-bit values.

    A kernel needs `kernel_us` beside its work and one on tensor cores `ramp_us`; the host needs `host_us` to launch it.
    A recurrent layer's time step takes `recurrent_us` at least. `layout` is the number of times that a convolution on
    tensor cores copies its images if they are not channels_last: by elements, as copying 16-bit values takes as long as
    copying 32-bit values.
    """

    fp32: float
    tf32: float
    half: float
    reuse: float
    convolution: float
    plain_convolution: float
    grouped: float
    bandwidth: float
    half_bandwidth: float
    plain_half: float
    plain_half_convolution: float
    kernel_us: float
    ramp_us: float
    host_us: float
    recurrent_us: float
    layout: float


def step_seconds(
    work: Work,
    gpu: GpuModel,
    efficiency: Efficiency,
    *,
    fp32_math: Fp32Math,
    channels_last: bool,
    graphs: bool = False,
) -> float:
    """Returns the seconds of a step; with `graphs` without launching by the host."""
    busy, host = gpu_and_host_seconds(work, gpu, efficiency, fp32_math=fp32_math, channels_last=channels_last)
    return busy if graphs else float((busy**_HIDDEN + host**_HIDDEN) ** (1 / _HIDDEN))


def gpu_and_host_seconds(
    work: Work, gpu: GpuModel, efficiency: Efficiency, *, fp32_math: Fp32Math, channels_last: bool
) -> tuple[float, float]:
    """Returns the seconds the GPU computes and those in which the host launches."""
    table = _arrays(work)
    kind, half = table["kind"], table["half"]
    products = kind == KINDS.index("matmul")
    recurrent = kind == KINDS.index("recurrent")
    convolutions = (kind == KINDS.index("convolution")) | (kind == KINDS.index("grouped"))
    thin = (kind == KINDS.index("grouped")) | (kind == KINDS.index("depthwise"))
    tf32 = (convolutions | recurrent) if fp32_math == "stock" else np.full(kind.shape, fp32_math == "tf32")
    dense = products | recurrent | convolutions
    tensor = dense & np.where(half, gpu.half is not None, tf32 & (gpu.tf32 is not None))
    slower = np.where(products | recurrent, efficiency.plain_half, efficiency.plain_half_convolution)
    plain = gpu.fp32 * efficiency.fp32 * np.where(half, slower, 1.0)
    plain = np.where(thin, plain * efficiency.grouped, plain)
    cores = np.where(half, (gpu.half or 0) * efficiency.half, (gpu.tf32 or 0) * efficiency.tf32) * table["fill"]
    rate = np.where(tensor, np.maximum(cores, plain), plain) * 1e12
    rate = 1 / (1 / rate + 1 / (efficiency.reuse * gpu.bandwidth * 1e9))
    rate *= np.where(convolutions, np.where(tensor, efficiency.convolution, efficiency.plain_convolution), 1.0)
    bandwidth = gpu.bandwidth * 1e9 * efficiency.bandwidth
    moved = table["bytes"] / np.where(half, efficiency.half_bandwidth, 1.0)
    work_s = np.maximum(table["flops"] / rate, moved / bandwidth)
    if not channels_last:
        copied = efficiency.layout * table["layout"] * np.where(half, 2.0, 1.0)
        copies = tensor & convolutions & (half | (cores > plain))  # in FP32 cuDNN need not take tensor cores
        work_s += np.where(copies, copied / bandwidth, 0.0)
    work_s = np.maximum(work_s, np.where(recurrent, table["steps"] * efficiency.recurrent_us * 1e-6, 0.0))
    fixed_us = table["launches"] * (efficiency.kernel_us + np.where(tensor, efficiency.ramp_us, 0.0))
    busy = float((table["count"] * (work_s + fixed_us * 1e-6)).sum())
    calls = table["launches"] * np.where(kind == KINDS.index("cast"), _CAST_HOST, 1.0)
    return busy, float((table["count"] * calls).sum()) * efficiency.host_us * 1e-6


@lru_cache(maxsize=1024)
def _arrays(work: Work) -> dict[str, Any]:
    """Returns a step's figures as arrays; operations that are equal have one row and a count."""
    counted: dict[tuple[Any, ...], int] = {}
    for one in work.operations:
        row = (
            KINDS.index(one.kind), one.in_half, one.flops, one.bytes, one.layout_bytes, one.fill, one.launches,
            one.steps,
        )  # fmt: skip
        counted[row] = counted.get(row, 0) + 1
    names = ("kind", "half", "flops", "bytes", "layout", "fill", "launches", "steps")
    columns = zip(names, zip(*counted, strict=True), strict=True)
    return {**{name: np.array(column) for name, column in columns}, "count": np.array(list(counted.values()))}
