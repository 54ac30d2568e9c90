"""Predictions for one GPU: half precision, channels_last and CUDA graphs, memory and batch, and what the GPU lacks."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.policy.findings import Finding
from amptune.predict.gpu_table import GpuModel
from amptune.predict.missing import missing_on
from amptune.predict.operation import StepFigures
from amptune.predict.roofline import gpu_and_host_seconds, step_seconds
from amptune.predict.speed_up import (
    Calibration,
    Known,
    Range,
    StepSetting,
    Verdict,
    calibration,
    half_speed_up,
    verdict_of,
)

__all__ = ["Gain", "Prediction", "predicted"]

# Fragments, cuDNN's workspaces and the CUDA context take memory beside tensors; round numbers.
_CONTEXT_BYTES = 0.6 * 2**30
_TENSOR_SHARE = 0.9
# Of measured peaks over predicted ones; 16 of 18 in tests/simulated/h200_grid.json lie in that range.
_MEMORY_SPREAD = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Whether a setting pays, and by how much."""

    verdict: Verdict
    ratio: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step should do on one GPU: predicted, not measured.

    `half` is over FP32; `channels_last` (None without convolutions of images or volumes) and `cuda_graphs` are over the
    same step in half precision without it. `memory_gib` and `largest_batch` are in FP32 and in half. `memory_bound` is
    the share of the GPU's time in FP32 that moving data takes, `host_share` the host's time to launch over the GPU's.
    """

    gpu: GpuModel
    half: Gain
    channels_last: Gain | None
    cuda_graphs: Gain
    memory_gib: tuple[Range, Range]
    largest_batch: tuple[int, int]
    memory_bound: float
    host_share: float
    missing: tuple[Finding, ...]


def predicted(step: StepFigures, gpu: GpuModel, setting: StepSetting, known: Known | None = None) -> Prediction:
    """Returns the prediction for a GPU."""
    fitted = calibration()
    half = half_speed_up(step, gpu, setting, known, fitted)
    busy, host = gpu_and_host_seconds(
        step.fp32, gpu, fitted.efficiency, fp32_math=setting.fp32_math, channels_last=setting.channels_last
    )
    return Prediction(
        gpu=gpu,
        half=Gain(verdict=verdict_of(half), ratio=half),
        channels_last=_channels_last(step, gpu, setting, fitted) if step.convolution_dims & {2, 3} else None,
        cuda_graphs=_cuda_graphs(step, gpu, setting, fitted),
        memory_gib=(_memory(step, 0), _memory(step, 1)),
        largest_batch=(_largest(step, gpu, 0), _largest(step, gpu, 1)),
        memory_bound=_memory_bound(step, gpu, setting, fitted),
        host_share=host / busy,
        missing=missing_on(gpu),
    )


def _channels_last(step: StepFigures, gpu: GpuModel, setting: StepSetting, fitted: Calibration) -> Gain:
    seconds = [
        step_seconds(step.half, gpu, fitted.efficiency, fp32_math=setting.fp32_math, channels_last=last)
        for last in (False, True)
    ]
    ratio = Range.around(seconds[0] / seconds[1], fitted.spread["channels_last"])
    return Gain(verdict=verdict_of(ratio), ratio=ratio)


def _cuda_graphs(step: StepFigures, gpu: GpuModel, setting: StepSetting, fitted: Calibration) -> Gain:
    seconds = [
        step_seconds(
            step.half, gpu, fitted.efficiency, fp32_math=setting.fp32_math, channels_last=setting.channels_last,
            graphs=graphs,
        )
        for graphs in (False, True)
    ]  # fmt: skip
    ratio = Range.around(seconds[0] / seconds[1], fitted.spread["cuda_graphs"])
    return Gain(verdict=verdict_of(ratio) if not step.waits else "does not", ratio=ratio)


def _memory(step: StepFigures, which: int) -> Range:
    """Returns the peak of a step's tensors at its batch size in GiB."""
    return Range.around((step.fixed_bytes[which] + step.batch_size * step.sample_bytes[which]) / 2**30, _MEMORY_SPREAD)


def _largest(step: StepFigures, gpu: GpuModel, which: int) -> int:
    """Returns the largest batch that should fit at the range's upper end; 0 if none does."""
    free = gpu.memory * 2**30 * _TENSOR_SHARE - _CONTEXT_BYTES - step.fixed_bytes[which]
    return max(int(free / max(step.sample_bytes[which], 1.0)), 0)


def _memory_bound(step: StepFigures, gpu: GpuModel, setting: StepSetting, fitted: Calibration) -> float:
    moved = sum(one.bytes for one in step.fp32.operations if not one.flops)
    busy, _ = gpu_and_host_seconds(
        step.fp32, gpu, fitted.efficiency, fp32_math=setting.fp32_math, channels_last=setting.channels_last
    )
    return min(moved / (gpu.bandwidth * 1e9 * fitted.efficiency.bandwidth) / busy, 1.0)
