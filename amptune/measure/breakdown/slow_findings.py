"""Findings on why a training step is slow, made from its profile; there is no finding if nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from amptune.hardware.machine import Hardware
from amptune.measure.breakdown.matmul_findings import product_findings
from amptune.measure.breakdown.module_times import (
    GAIN,
    LISTED,
    MOST,
    NAMED,
    SHARE,
    Times,
    called,
    finding_about,
    summed,
    where,
)
from amptune.measure.results.step_profile import ALIGNED, StepProfile
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = ["speed_findings"]

# Even with a full queue a GPU idles 1 or 2 µs between kernels: up to a sixth of a step of small kernels. A remedy is
# named if it saves this part of the launches: at a launch-bound batch size, SE-ResNeXt50 with 17 % casts is faster in
# TF32; DeepLabV3+ with 13 % is not.
LAUNCHES_SHARE = 0.15
# A host that needs less than this part of a step's time to enqueue the step is ahead of the device, so the device does
# not wait for it.
HOST_AT_ITS_LIMIT = 0.9
# Once a step, GradScaler reads if a gradient overflowed.
FP16_SYNCHRONIZATIONS = 1
# A channels_last model has layout copies only around its first layer.
LAYOUT_SHARE = 0.03
# Normalization takes up to a quarter of a step in healthy networks.
OPERATION_SHARE = 0.3
# A module that takes less is none of the slowest.
SAID = 0.01


def speed_findings(profile: StepProfile, hardware: Hardware, policy: Policy) -> tuple[Finding, ...]:
    """Returns the findings of a profile taken under `policy`, the largest gain first; the slowest modules come last.

    `gain_ms` is the most that a step could save without the cause, or a guess. Gains do not simply add up: while a step
    is `launch-bound`, saving GPU time saves little of the step's time.
    """
    found = [
        *_launch_bound(profile, policy),
        *_casts(profile, policy),
        *_layouts(profile, policy),
        *_slow_operation(profile, policy),
        *_optimizer(profile, policy),
        *product_findings(profile, hardware.gpu, policy),
    ]
    return (*sorted(found, key=lambda finding: -finding.figures["gain_ms"]), *_slowest_modules(profile))


def _launch_bound(profile: StepProfile, policy: Policy) -> Iterator[Finding]:
    idle_ms, busy_ms, host_ms = profile.gpu_idle_ms, profile.gpu_busy_ms, profile.host_ms
    if idle_ms is None or busy_ms is None or host_ms is None:
        return
    share = idle_ms / profile.step_ms
    is_host_late = HOST_AT_ITS_LIMIT * host_ms > busy_ms or host_ms >= HOST_AT_ITS_LIMIT * profile.step_ms
    if share <= LAUNCHES_SHARE or not is_host_late or not profile.kernels:
        return
    kernel_us = 1000 * busy_ms / profile.kernels
    message = (
        f"the GPU waits for {share:.0%} of the step: its {profile.kernels:.0f} kernels of {kernel_us:.2g} µs on "
        f"average are launched from Python slower than they run{_waiting(profile, policy)}; try "
        f"{_fewer_launches(profile, policy)}"
    )
    figures = {
        "gain_ms": idle_ms,
        "idle_share": share,
        "step_ms": profile.step_ms,
        "gpu_busy_ms": busy_ms,
        "host_ms": host_ms,
        "kernels": profile.kernels,
        "kernel_us": kernel_us,
        "casts": profile.cast_count,
        "optimizer_kernels": profile.optimizer_kernels,
        "synchronizations": profile.synchronizations,
    }
    yield Finding(code="launch-bound", message=message, figures=figures)


def _waiting(profile: StepProfile, policy: Policy) -> str:
    own = profile.synchronizations - (FP16_SYNCHRONIZATIONS if policy.scales_loss else 0)
    if own < 1:
        return ""
    times = "once" if own < 2 else f"{own:.0f} times"
    return f", and the host stops {times} a step to wait for the GPU (.item(), .cpu(), or a tensor in an `if`)"


def _fewer_launches(profile: StepProfile, policy: Policy) -> str:
    ways = []
    if policy.compile == "off":
        ways += ["torch.compile"] if policy.cuda_graphs else ["CUDA graphs (cuda_graphs: true)", "torch.compile"]
    elif policy.compile == "default":
        ways.append("CUDA graphs (compile: reduce-overhead)")
    if not policy.fused_optimizer and profile.optimizer_kernels >= LAUNCHES_SHARE * profile.kernels:
        ways.append(f"a fused optimizer ({profile.optimizer_kernels:.0f} of the kernels are the optimizer's)")
    if policy.autocast != "off" and profile.cast_count >= LAUNCHES_SHARE * profile.kernels:
        ways.append(f"no autocast ({profile.cast_count:.0f} of the kernels are casts)")
    return " or ".join([", ".join(ways), "a larger batch"] if ways else ["a larger batch"])


def _casts(profile: StepProfile, policy: Policy) -> Iterator[Finding]:
    if profile.cast_ms <= SHARE * profile.step_ms:
        return
    times: Times = [(cast.module, cast.ms) for cast in profile.casts]
    mib = sum(cast.mib for cast in profile.casts)
    message = (
        f"casts between floating-point types take {profile.cast_ms:.3g} ms of the step's {profile.step_ms:.3g}: "
        f"{profile.cast_count:.0f} copies that read and write {mib:.0f} MiB, {where(times, profile)}; "
        f"{_fewer_casts(times, policy)}"
    )
    figures = {"gain_ms": profile.cast_ms, "casts": profile.cast_count, "mib": mib}
    yield finding_about("casts", message, profile, times, **figures)


def _fewer_casts(times: Times, policy: Policy) -> str:
    if policy.precision == "half":
        return "look there for .float() and .to(dtype), and keep together what fp32_modules keeps in FP32"
    if policy.autocast == "off":
        return "they are the code's own, since autocast is off: look for .float(), .half() and .to(dtype)"
    if summed(times)[0][0] is None:
        return "look there for .float() and .to(dtype), and operations that autocast runs in FP32: most losses"
    return (
        "keep modules in FP32 that gain less than their casts cost (fp32_modules), or raise the batch size: weights "
        "are cast once for all of it"
    )


def _layouts(profile: StepProfile, policy: Policy) -> Iterator[Finding]:
    if profile.layout_ms <= LAYOUT_SHARE * profile.step_ms:
        return
    times: Times = [(layout.module, layout.ms) for layout in profile.layouts]
    count = sum(layout.count for layout in profile.layouts)
    kernels = [name for name, _ in summed((layout.kernel, layout.ms) for layout in profile.layouts)[:NAMED]]
    message = (
        f"copies into another memory layout take {profile.layout_ms:.3g} ms of the step's {profile.step_ms:.3g}: "
        f"{count:.0f} of them around convolutions ({', '.join(kernels)}), {where(times, profile)}; "
        f"{_fewer_layouts(profile, policy)}"
    )
    figures = {"gain_ms": profile.layout_ms, "copies": count, "kernels": kernels}
    yield finding_about("layout-transposes", message, profile, times, **figures)


def _fewer_layouts(profile: StepProfile, policy: Policy) -> str:
    padded_ms = sum(layout.ms for layout in profile.layouts if layout.channels and layout.channels % ALIGNED)
    if padded_ms >= MOST * profile.layout_ms and policy.precision != "off":
        return (
            "tensor cores want input channels in multiples of 8 in half precision, and the copies arrange that; in "
            "FP32 (fp32_modules) such a convolution is faster if it is not large"
        )
    if policy.memory_format == "contiguous":
        return "try memory_format: channels_last (channels_last_3d for volumes), which most of them go without"
    return "a .contiguous(), a view or an operation without channels_last before them asks for the other layout"


def _slow_operation(profile: StepProfile, policy: Policy) -> Iterator[Finding]:
    """Yields a finding if one kind of operation takes too much of the step, probably due to an unsuitable kernel."""
    kinds = summed((one.operation, one.ms) for one in profile.operations)
    if not profile.attributed or not kinds or kinds[0][1] <= OPERATION_SHARE * profile.step_ms:
        return
    operation, ms = kinds[0]
    times: Times = [(one.module, one.ms) for one in profile.operations if one.operation == operation]
    ways = ["memory_format: channels_last"] if policy.memory_format == "contiguous" else []
    # Many modules in FP32 cost more in casts than they gain, for example ResNet-50's BatchNorm.
    ways += ["FP32 for it (fp32_modules)"] if policy.precision != "off" and summed(times)[0][1] >= MOST * ms else []
    ways += ["torch.compile, which fuses it with its neighbours"] if policy.compile == "off" else []
    message = (
        f"{operation} takes {ms:.3g} ms of the step's {profile.step_ms:.3g}, forward and backward, "
        f"{where(times, profile)}; it is no matrix product, so it is bound by memory traffic or by an unsuitable "
        f"kernel: try {' or '.join(ways) or 'another operation in its place'}"
    )
    figures = {"gain_ms": GAIN * ms, "operation": operation, "operation_ms": ms}
    yield finding_about("slow-operation", message, profile, times, **figures)


def _optimizer(profile: StepProfile, policy: Policy) -> Iterator[Finding]:
    ms = profile.optimizer_ms
    if policy.fused_optimizer or profile.device == "cpu" or ms <= SHARE * profile.step_ms:
        return
    yield Finding(
        code="unfused-optimizer",
        message=f"the optimizer takes {ms:.3g} ms of the step's {profile.step_ms:.3g}; try fused_optimizer: true",
        figures={"gain_ms": GAIN * ms, "optimizer_ms": ms, "step_ms": profile.step_ms},
    )


def _slowest_modules(profile: StepProfile) -> Iterator[Finding]:
    modules = [(called(time.module), time.ms) for time in profile.modules if time.module is not None]
    if not modules or not profile.attributed:
        return
    slowest = [one for one in sorted(modules, key=lambda one: -one[1])[:LISTED] if one[1] >= SAID * profile.step_ms]
    if not slowest:
        return
    listed = ", ".join(f"{name} {ms:.3g} ms ({ms / profile.step_ms:.0%})" for name, ms in slowest)
    yield Finding(
        code="slowest-modules",
        message=f"the slowest modules, forward and backward, of a step of {profile.step_ms:.3g} ms: {listed}",
        figures={"step_ms": profile.step_ms, "modules": [{"module": name, "ms": ms} for name, ms in slowest]},
    )
