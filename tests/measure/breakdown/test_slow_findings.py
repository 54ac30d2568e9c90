"""What is said about a profile, and what is not where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated.recorded import H200

from amptune.hardware.machine import Gpu
from amptune.measure.breakdown.slow_findings import speed_findings
from amptune.measure.results.step_profile import (
    CastTime,
    LayoutTime,
    ModuleTime,
    OperationTime,
    ProductTime,
    StepProfile,
    UnalignedMatmul,
)
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe

BF16 = amp_recipe("bf16")
TF32, IEEE = Policy(fp32_math="tf32"), Policy(fp32_math="ieee")
IN_FP32 = amp_recipe("bf16", fp32_modules=(Fp32Rule(path="body"),))
assert H200.gpu is not None
PASCAL = replace(H200.gpu, generation="pascal", tensor_cores=False, tf32=False, bf16=False, fp16_rate=1 / 64)

# A step of 10 ms in which nothing is wrong: the GPU is always busy, with products on tensor cores.
HEALTHY = StepProfile(
    device="cuda",
    steps=3,
    step_ms=10.0,
    host_ms=4.0,
    gpu_busy_ms=9.8,
    kernels=400,
    optimizer_ms=0.5,
    optimizer_kernels=10,
    modules=(ModuleTime(module="body", ms=8.0), ModuleTime(module="head", ms=1.0)),
    casts=(CastTime(module="body", count=40, ms=0.4, mib=900.0),),
    products=(ProductTime(module="body", kind="matmul", plain_ms=0.2),),
    operations=(OperationTime(module="body", operation="layer_norm", count=10, ms=0.8),),
)


def found(policy: Policy = BF16, gpu: Gpu | None = H200.gpu, **changed: Any) -> dict[str, Finding]:
    """The faults found in the healthy step with changes, by code."""
    findings = speed_findings(replace(HEALTHY, **changed), replace(H200, gpu=gpu), policy)
    return {finding.code: finding for finding in findings if finding.code != "slowest-modules"}


def cast(module: str | None = "body", count: float = 40, ms: float = 1.6) -> CastTime:
    return CastTime(module=module, count=count, ms=ms, mib=900.0)


def layouts(channels: int, ms: float = 1.0) -> tuple[LayoutTime, ...]:
    return (LayoutTime(module="stem", kernel="nchwToNhwcKernel", channels=channels, count=3, ms=ms),)


def unaligned(ms: float) -> tuple[UnalignedMatmul, ...]:
    return (UnalignedMatmul(module="head", op="addmm", m=8192, n=50257, k=768, count=1, ms=ms),)


def products(kind: Any, plain_ms: float, module: str = "body", in_half: bool | None = None) -> tuple[ProductTime, ...]:
    return (ProductTime(module=module, kind=kind, plain_ms=plain_ms, slowest_plain="sgemm", in_half=in_half),)


def operations(count: int) -> tuple[OperationTime, ...]:
    return tuple(OperationTime(module=f"{i}", operation="pool", count=2, ms=6.0 / count) for i in range(count))


def compiled(mode: Any) -> Policy:
    return amp_recipe("bf16", compile=mode)


ISLAND = products("matmul", 5.0, in_half=False)
CHANNELS_LAST = amp_recipe("bf16", memory_format="channels_last")
BOUND: dict[str, Any] = {"gpu_busy_ms": 3.9, "host_ms": 9.9, "kernels": 812}


@pytest.mark.parametrize(
    ("policy", "changes", "code", "module", "gain_ms", "said"),
    [
        (BF16, BOUND, "launch-bound", None, 6.1, "try CUDA graphs (cuda_graphs: true), torch.compile or a larger"),
        (compiled("default"), BOUND, "launch-bound", None, 6.1, "try CUDA graphs (compile: reduce-overhead) or a"),
        (compiled("reduce-overhead"), BOUND, "launch-bound", None, 6.1, "try a larger batch"),
        (BF16, BOUND | {"optimizer_kernels": 130}, "launch-bound", None, 6.1, "a fused optimizer (130 of"),
        (BF16, BOUND | {"casts": (cast(count=130, ms=0.4),)}, "launch-bound", None, 6.1, "no autocast (130 of"),
        (BF16, BOUND | {"synchronizations": 1.0}, "launch-bound", None, 6.1, "the host stops once a step"),
        (amp_recipe("fp16"), BOUND | {"synchronizations": 3.0}, "launch-bound", None, 6.1, "stops 2 times"),
        (BF16, {"casts": (cast("head", 4, 1.2), cast(ms=0.4))}, "casts", "head", 1.6, "keep modules in FP32"),
        (STOCK, {"casts": (cast(),)}, "casts", "body", 1.6, "since autocast is off"),
        (BF16, {"casts": (cast(None),)}, "casts", None, 1.6, "operations that autocast runs in FP32"),
        (BF16, {"layouts": layouts(64)}, "layout-transposes", "stem", 1.0, "try memory_format: channels_last"),
        (CHANNELS_LAST, {"layouts": layouts(64)}, "layout-transposes", "stem", 1.0, "asks for the other layout"),
        (BF16, {"layouts": layouts(3)}, "layout-transposes", "stem", 1.0, "fp32_modules"),
        (STOCK, {"layouts": layouts(3)}, "layout-transposes", "stem", 1.0, "channels_last"),
        (BF16, {"unaligned": unaligned(2.0)}, "unaligned-matmul", "head", 0.6, "with n = 50257: pad"),
        (BF16, {"products": products("matmul", 5.0)}, "no-tensor-cores", "body", 0.0, "half precision gains little"),
        (STOCK, {"products": products("matmul", 5.0)}, "no-tensor-cores", "body", 3.75, "fp32_math: tf32, or auto"),
        (BF16, {"products": ISLAND}, "no-tensor-cores", "body", 3.75, "kept in FP32 use them with fp32_math: tf32"),
        (IN_FP32, {"products": products("matmul", 5.0, in_half=True)}, "no-tensor-cores", "body", 0.0, "very few rows"),
        (STOCK, {"products": products("convolution", 5.0)}, "no-tensor-cores", "body", 0.0, "for few channels"),
        (TF32, {"products": products("matmul", 5.0)}, "no-tensor-cores", "body", 0.0, "very few rows"),
        (IEEE, {"products": products("convolution", 5.0)}, "no-tensor-cores", "body", 3.75, "tf32, or autocast"),
        (IN_FP32, {"products": products("matmul", 5.0)}, "no-tensor-cores", "body", 3.75, "with fp32_math: tf32"),
        (BF16, {"operations": operations(1)}, "slow-operation", "0", None, "FP32 for it (fp32_modules)"),
        (BF16, {"optimizer_ms": 2.0}, "unfused-optimizer", None, None, "try fused_optimizer: true"),
    ],
)
def test_a_fault_is_said_with_its_module_its_gain_and_the_ways_out(
    policy: Policy, changes: dict[str, Any], code: str, module: str | None, gain_ms: float | None, said: str
) -> None:
    (finding,) = found(policy, **changes).values()
    assert (finding.code, finding.module) == (code, module)
    assert said in finding.message
    assert gain_ms is None or finding.figures["gain_ms"] == pytest.approx(gain_ms)


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        (BF16, {}),
        (BF16, {"gpu_busy_ms": 8.0, "host_ms": 4.0}),  # the host is ahead
        (BF16, {"gpu_busy_ms": 8.7, "host_ms": 9.9}),  # too little to say
        (BF16, {"layouts": layouts(64, ms=0.2)}),
        (BF16, {"unaligned": unaligned(0.3)}),
        (amp_recipe("bf16", fused_optimizer=True), {"optimizer_ms": 2.0}),
    ],
)
def test_what_costs_little_or_was_taken_care_of_is_not_said(policy: Policy, changes: dict[str, Any]) -> None:
    assert not found(policy, **changes)


def test_advice_leaves_out_what_would_not_help() -> None:
    of_the_scaler = found(amp_recipe("fp16"), **BOUND, synchronizations=1.0)["launch-bound"]  # its own reading
    assert "the host stops" not in of_the_scaler.message
    assert "fp32_modules" not in found(operations=operations(10))["slow-operation"].message  # of many modules


def test_a_gpu_without_tensor_cores_is_told_what_half_precision_is_worth_there() -> None:
    plain, fast = products("matmul", 5.0), replace(PASCAL, fp16_rate=2.0)
    assert "FP16 runs at 0.016 of the rate of FP32" in found(gpu=PASCAL, products=plain)["no-tensor-cores"].message
    assert "saves memory and traffic" in found(gpu=fast, products=plain)["no-tensor-cores"].message
    assert not found(gpu=PASCAL, products=products("matmul", 0.5))


def test_the_most_to_gain_comes_first_and_the_slowest_modules_last() -> None:
    profile = replace(HEALTHY, gpu_busy_ms=8.0, host_ms=9.9, layouts=layouts(64, ms=3.0), unaligned=unaligned(1.5))
    findings = speed_findings(profile, H200, BF16)
    codes = ["layout-transposes", "launch-bound", "unaligned-matmul", "slowest-modules"]
    assert [finding.code for finding in findings] == codes
    assert findings[-1].message.endswith("of a step of 10 ms: body 8 ms (80%), head 1 ms (10%)")


def test_a_compiled_model_is_not_blamed_on_a_module() -> None:
    blind = replace(HEALTHY, casts=(cast(None),), attributed=False, modules=(ModuleTime(module=None, ms=9.0),))
    (finding,) = speed_findings(blind, H200, compiled("default"))
    assert (finding.code, finding.module) == ("casts", None)
    assert "modules cannot be told apart" in finding.message


def test_on_a_cpu_only_what_holds_there_is_said() -> None:
    body = (ModuleTime(module="body", ms=6.0),)
    profile = StepProfile(device="cpu", steps=1, step_ms=10.0, optimizer_ms=3.0, modules=body, casts=(cast(),))
    findings = speed_findings(profile, replace(H200, device="cpu", gpu=None), BF16)
    assert [finding.code for finding in findings] == ["casts", "slowest-modules"]
