"""What is said about a profile, and what is not where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recorded_steps import HOPPER, machine

from amptune.hardware.machine import Gpu
from amptune.measure.breakdown.slow_findings import speed_findings
from amptune.measure.results.step_profile import (
    CastTime,
    GroupedConvolution,
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
PASCAL = replace(HOPPER, name="P40", generation="pascal", tensor_cores=False, tf32=False, bf16=False, fp16_rate=1 / 64)

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


def found(policy: Policy = BF16, gpu: Gpu | None = HOPPER, **changed: Any) -> dict[str, Finding]:
    """The faults found in the healthy step with changes, by code."""
    findings = speed_findings(replace(HEALTHY, **changed), machine(gpu), policy)
    return {finding.code: finding for finding in findings if finding.code != "slowest-modules"}


def products(kind: str, plain_ms: float, module: str = "body") -> tuple[ProductTime, ...]:
    assert kind in ("matmul", "convolution")
    return (ProductTime(module=module, kind=kind, plain_ms=plain_ms, slowest_plain="sgemm"),)  # type: ignore[arg-type]  # one of the two


def test_nothing_is_said_of_a_healthy_step_but_where_its_time_goes() -> None:
    (only,) = speed_findings(HEALTHY, machine(), BF16)
    assert only.code == "slowest-modules"
    assert only.message == (
        "the slowest modules, forward and backward, of a step of 10 ms: body 8 ms (80%), head 1 ms (10%)"
    )


def test_a_gpu_that_waits_for_its_launches_is_said_with_the_ways_out() -> None:
    finding = found(gpu_busy_ms=3.9, host_ms=9.9, kernels=812)["launch-bound"]
    assert finding.message == (
        "the GPU waits for 61% of the step: its 812 kernels of 4.8 µs on average are launched from Python slower than "
        "they run; try CUDA graphs (cuda_graphs: true), torch.compile or a larger batch"
    )
    assert finding.figures["idle_share"] == pytest.approx(0.61)
    assert finding.figures["gain_ms"] == pytest.approx(6.1)


def test_a_gpu_that_idles_although_the_host_is_ahead_is_not_launch_bound() -> None:
    assert not found(gpu_busy_ms=8.0, host_ms=4.0)
    assert not found(gpu_busy_ms=8.7, host_ms=9.9)


def test_launch_advice_leaves_out_what_the_policy_does_already() -> None:
    bound: dict[str, Any] = {"gpu_busy_ms": 3.9, "host_ms": 9.9, "kernels": 812}
    default = found(amp_recipe("bf16", compile="default"), **bound)["launch-bound"].message
    assert default.endswith("try CUDA graphs (compile: reduce-overhead) or a larger batch")
    graphs = found(amp_recipe("bf16", compile="reduce-overhead"), **bound)["launch-bound"].message
    assert graphs.endswith("try a larger batch")


def test_launch_advice_counts_what_optimizer_and_casts_launch() -> None:
    casts = (CastTime(module="body", count=80, ms=0.4, mib=900.0),)
    message = found(gpu_busy_ms=3.9, host_ms=9.9, optimizer_kernels=100, casts=casts)["launch-bound"].message
    assert "a fused optimizer (100 of the kernels are the optimizer's)" in message
    assert "no autocast (80 of the kernels are casts)" in message


def test_a_step_that_waits_for_the_gpu_is_told_so_but_the_loss_scalers_own_reading_is_not() -> None:
    bound: dict[str, Any] = {"gpu_busy_ms": 3.9, "host_ms": 9.9, "synchronizations": 1.0}
    assert "the host stops once a step to wait for the GPU (.item()" in found(**bound)["launch-bound"].message
    assert "the host stops" not in found(amp_recipe("fp16"), **bound)["launch-bound"].message


def test_casts_that_take_a_tenth_of_the_step_are_said_with_their_module() -> None:
    casts = (
        CastTime(module="head", count=4, ms=1.2, mib=1800.0),
        CastTime(module="body", count=40, ms=0.4, mib=900.0),
    )
    finding = found(casts=casts)["casts"]
    assert finding.module == "head"
    assert finding.message.startswith(
        "casts between floating-point types take 1.6 ms of the step's 10: 44 copies that read and write 2700 MiB, "
        "most in head (1.2 ms), body (0.4 ms); keep modules in FP32"
    )
    assert "since autocast is off" in found(STOCK, casts=casts)["casts"].message
    assert "operations that autocast runs in FP32" in found(casts=(replace(casts[0], module=None),))["casts"].message


def layouts(channels: int, ms: float = 1.0) -> tuple[LayoutTime, ...]:
    return (LayoutTime(module="stem", kernel="nchwToNhwcKernel", channels=channels, count=3, ms=ms),)


def test_layout_copies_ask_for_channels_last_unless_it_is_on() -> None:
    finding = found(layouts=layouts(64))["layout-transposes"]
    assert finding.module == "stem"
    assert "3 of them around convolutions (nchwToNhwcKernel), in stem; try memory_format: channels_last" in str(finding)
    on = found(amp_recipe("bf16", memory_format="channels_last"), layouts=layouts(64))["layout-transposes"].message
    assert "asks for the other layout" in on
    assert not found(layouts=layouts(64, ms=0.2))


def test_layout_copies_for_three_channels_ask_for_fp32_instead() -> None:
    assert "fp32_modules" in found(layouts=layouts(3))["layout-transposes"].message
    assert "channels_last" in found(STOCK, layouts=layouts(3))["layout-transposes"].message


def unaligned(ms: float) -> tuple[UnalignedMatmul, ...]:
    return (UnalignedMatmul(module="head", op="addmm", m=8192, n=50257, k=768, count=1, ms=ms),)


def test_a_product_with_an_odd_size_asks_for_padding() -> None:
    finding = found(unaligned=unaligned(2.0))["unaligned-matmul"]
    assert finding.module == "head"
    assert finding.message == (
        "half-precision products with a dimension that is no multiple of 8 take 2 ms of the step's 10, in head; the "
        "slowest is an addmm of (m, k) × (k, n) with n = 50257: pad that size to the next multiple of 64 (a "
        "vocabulary of 50257 to 50304, say)"
    )
    assert finding.figures["matmuls"] == [{"module": "head", "op": "addmm", "m": 8192, "n": 50257, "k": 768, "ms": 2.0}]
    assert not found(unaligned=unaligned(0.3))


def test_grouped_convolutions_without_tensor_cores_are_said_once() -> None:
    depthwise = (GroupedConvolution(module="conv", groups=256, channels=256, ms=4.0, plain_ms=3.0),)
    mine = found(grouped=depthwise, products=products("convolution", 3.0, "conv"))
    assert list(mine) == ["grouped-convolution"]
    assert mine["grouped-convolution"].module == "conv"
    assert "a group for each of its 256 channels (depthwise)" in mine["grouped-convolution"].message
    assert "try channels_last, cudnn_benchmark, keeping them in FP32 (fp32_modules), wider groups" in str(
        mine["grouped-convolution"]
    )


def test_grouped_convolutions_on_tensor_cores_are_fine() -> None:
    assert not found(grouped=(GroupedConvolution(module="c", groups=32, channels=512, ms=4.0, plain_ms=0.2),))


@pytest.mark.parametrize(
    ("policy", "kind", "advice"),
    [
        (STOCK, "matmul", "try fp32_math: tf32, or autocast"),
        (Policy(fp32_math="ieee"), "convolution", "try fp32_math: tf32, or autocast"),
        (STOCK, "convolution", "the library chose no such kernel, as it does for few channels"),
        (Policy(fp32_math="tf32"), "matmul", "the library chose no such kernel, as it does for very few rows"),
        (BF16, "matmul", "half precision gains little there, so try fp32_modules"),
        (amp_recipe("bf16", fp32_modules=(Fp32Rule(path="body"),)), "matmul", "use them with fp32_math: tf32"),
    ],
)
def test_products_without_tensor_cores_say_what_would_use_them(policy: Policy, kind: str, advice: str) -> None:
    finding = found(policy, products=products(kind, 5.0))["no-tensor-cores"]
    assert advice in finding.message
    assert finding.figures["kernels"] == ["sgemm"]


def test_a_gpu_without_tensor_cores_is_told_what_half_precision_is_worth_there() -> None:
    message = found(gpu=PASCAL, products=products("matmul", 5.0))["no-tensor-cores"].message
    assert "this P40 has none, and FP16 runs at 0.016 of the rate of FP32 on it; keep products in FP32" in message
    fast = replace(PASCAL, name="P100", fp16_rate=2.0)
    assert "saves memory and traffic" in found(gpu=fast, products=products("matmul", 5.0))["no-tensor-cores"].message
    assert not found(gpu=PASCAL, products=products("matmul", 0.5))


def test_one_operation_that_outweighs_the_rest_is_named() -> None:
    pooling = (OperationTime(module="pool", operation="adaptive_avg_pool2d", count=2, ms=6.0),)
    finding = found(operations=pooling)["slow-operation"]
    assert finding.module == "pool"
    assert finding.message.startswith("adaptive_avg_pool2d takes 6 ms of the step's 10, forward and backward, in pool;")
    assert "FP32 for it (fp32_modules)" in finding.message
    spread = tuple(OperationTime(module=f"{i}", operation="batch_norm", count=2, ms=0.6) for i in range(10))
    assert "fp32_modules" not in found(operations=spread)["slow-operation"].message


def test_an_optimizer_that_could_be_fused_is_said_until_it_is() -> None:
    assert "try fused_optimizer: true" in found(optimizer_ms=2.0)["unfused-optimizer"].message
    assert not found(amp_recipe("bf16", fused_optimizer=True), optimizer_ms=2.0)


def test_the_most_to_gain_comes_first_and_the_slowest_modules_last() -> None:
    profile = replace(HEALTHY, gpu_busy_ms=8.0, host_ms=9.9, layouts=layouts(64, ms=3.0), unaligned=unaligned(1.5))
    codes = [finding.code for finding in speed_findings(profile, machine(), BF16)]
    assert codes == ["layout-transposes", "launch-bound", "unaligned-matmul", "slowest-modules"]


def test_a_compiled_model_is_not_blamed_on_a_module() -> None:
    blind: dict[str, Any] = {"attributed": False, "modules": (ModuleTime(module=None, ms=9.0),)}
    casts = (CastTime(module=None, count=4, ms=1.2, mib=1800.0),)
    policy = amp_recipe("bf16", compile="default")
    findings = speed_findings(replace(HEALTHY, casts=casts, **blind), machine(), policy)
    assert [finding.code for finding in findings] == ["casts"]
    assert "modules cannot be told apart" in findings[0].message
    assert findings[0].module is None


def test_on_a_cpu_only_what_holds_there_is_said() -> None:
    profile = StepProfile(
        device="cpu",
        steps=1,
        step_ms=10.0,
        optimizer_ms=3.0,
        modules=(ModuleTime(module="body", ms=6.0),),
        casts=(CastTime(module="body", count=4, ms=2.0, mib=10.0),),
    )
    codes = [finding.code for finding in speed_findings(profile, machine(None), BF16)]
    assert codes == ["casts", "slowest-modules"]
