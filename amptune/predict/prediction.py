"""Predictions for one GPU: half precision, channels_last and CUDA graphs, memory and batch, and what the GPU lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from amptune.policy.findings import Finding
from amptune.predict.gpu_table import GpuModel
from amptune.predict.missing_features import missing_on
from amptune.predict.operation import StepFigures
from amptune.predict.roofline import gpu_and_host_seconds, step_seconds
from amptune.predict.speed_up import (
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
# Less of the products' work than this is not worth a word.
_ODD_SHARE = 0.05
_REFUSED = Finding(
    code="refused-by-autocast",
    message="autocast on a GPU refuses binary_cross_entropy (BCELoss): give what is before the sigmoid to "
    "binary_cross_entropy_with_logits, or compute the loss with autocast off and .float() inputs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Whether a setting pays, and by how much."""

    verdict: Verdict
    ratio: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step on one GPU, predicted and not measured.

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
    maths, last = setting.fp32_math, setting.channels_last

    def half_s(*, channels_last: bool = last, graphs: bool = False) -> float:
        return step_seconds(
            step.half, gpu, fitted.efficiency, fp32_math=maths, channels_last=channels_last, graphs=graphs
        )

    half = half_speed_up(step, gpu, setting, known, fitted)
    layouts = _gain(half_s(channels_last=False) / half_s(channels_last=True), fitted.spread["channels_last"])
    graphs = _gain(half_s() / half_s(graphs=True), fitted.spread["cuda_graphs"])
    busy_s, host_s = gpu_and_host_seconds(step.fp32, gpu, fitted.efficiency, fp32_math=maths, channels_last=last)
    moved = sum(one.bytes for one in step.fp32.operations if not one.flops)
    return Prediction(
        gpu=gpu,
        half=Gain(verdict=verdict_of(half), ratio=half),
        channels_last=layouts if step.convolution_dims & {2, 3} else None,
        cuda_graphs=replace(graphs, verdict="does not") if step.waits else graphs,
        memory_gib=(_memory(step, 0), _memory(step, 1)),
        largest_batch=(_largest(step, gpu, 0), _largest(step, gpu, 1)),
        memory_bound=min(moved / (gpu.bandwidth * 1e9 * fitted.efficiency.bandwidth) / busy_s, 1.0),
        host_share=host_s / busy_s,
        missing=(*([_REFUSED] if step.raises else []), *_odd_sizes(step, gpu), *missing_on(gpu)),
    )


def _odd_sizes(step: StepFigures, gpu: GpuModel) -> Iterator[Finding]:
    """Yields a finding if much of the products' work has a size that tensor cores take more slowly."""
    products = [one for one in step.half.operations if one.kind == "matmul"]
    odd = [one for one in products if one.odd]
    share = sum(one.flops for one in odd) / max(sum(one.flops for one in products), 1.0)
    if gpu.half is not None and share > _ODD_SHARE:
        most = max(odd, key=lambda one: one.flops)
        where = f" in {most.module}" if most.module else ""
        message = (
            f"{share:.0%} of the work in matrix products has a dimension that is no multiple of 8, the most with "
            f"{most.odd}{where}: tensor cores take it more slowly; pad it to a multiple of 64, as a vocabulary of "
            "50257 to 50304"
        )
        yield Finding(code="odd-sizes", message=message, figures={"share": share, "size": most.odd})


def _gain(times: float, spread: float) -> Gain:
    ratio = Range.around(times, spread)
    return Gain(verdict=verdict_of(ratio), ratio=ratio)


def _memory(step: StepFigures, which: int) -> Range:
    """Returns the peak of a step's tensors at its batch size in GiB."""
    return Range.around((step.fixed_bytes[which] + step.batch_size * step.sample_bytes[which]) / 2**30, _MEMORY_SPREAD)


def _largest(step: StepFigures, gpu: GpuModel, which: int) -> int:
    """Returns the largest batch that should fit at the range's upper end; 0 if none does."""
    free = gpu.memory * 2**30 * _TENSOR_SHARE - _CONTEXT_BYTES - step.fixed_bytes[which]
    return max(int(free / max(step.sample_bytes[which], 1.0)), 0)
