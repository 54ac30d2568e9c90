"""Profiling a training step: on this CPU for real, and on a GPU as it was recorded there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import CPU, Checkpointed, workload_of
from recorded_steps import found_in, recorded
from torch import nn

from amptune.measure.bench.bench import Bench
from amptune.measure.breakdown.figures import distil
from amptune.measure.breakdown.operation_kinds import kind_of_kernel
from amptune.measure.breakdown.profiler import profile_step
from amptune.measure.breakdown.step_trace import MODULE_RANGE, STEP_RANGE, Kernel, Op, StepTrace, read_trace
from amptune.measure.results.step_profile import StepProfile
from amptune.policy.settings import STOCK, Policy, amp_recipe

BF16 = amp_recipe("bf16")


def profiled(model: nn.Module, policy: Policy, steps: int = 2, **parts: Any) -> StepProfile:
    return profile_step(Bench(workload_of(model, **parts), CPU), policy, steps=steps)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


@pytest.fixture(scope="module")
def in_bf16() -> StepProfile:
    return profiled(classifier(), BF16, shape=(64,))


def test_casts_under_autocast_are_counted_and_attributed_to_the_module_that_needs_them(in_bf16: StepProfile) -> None:
    casts = {cast.module: cast for cast in in_bf16.casts}
    assert casts["0"].count == 5  # weight, bias and input, and back the gradients of the first two
    assert casts["2"].count == 4  # its input arrives in bf16
    assert "1" not in casts
    weights_mib = 2 * 64 * 256 * (4 + 2) / 2**20
    assert casts["0"].mib == pytest.approx(weights_mib, rel=0.1)


def test_fp32_has_no_casts_and_a_cpu_no_gpu_figures() -> None:
    profile = profiled(classifier(), STOCK, shape=(64,))
    assert profile.casts == ()
    assert (profile.device, profile.gpu_busy_ms, profile.gpu_idle_ms, profile.host_ms) == ("cpu", None, None, None)
    assert (profile.kernels, profile.unaligned, profile.products) == (0, (), ())


def test_times_on_a_cpu_add_up_to_the_step_without_the_profiler(in_bf16: StepProfile) -> None:
    """However fast this machine is: the step's own range has what no operation takes, and all are scaled together."""
    accounted_ms = sum(module.ms for module in in_bf16.modules) + in_bf16.optimizer_ms
    assert accounted_ms == pytest.approx(in_bf16.step_ms, rel=0.01)
    assert {module.module for module in in_bf16.modules} == {"", "0", "1", "2", None}
    assert in_bf16.optimizer_ms > 0


def test_what_a_checkpoint_runs_again_belongs_to_its_module() -> None:
    model = nn.Sequential(Checkpointed(nn.Linear(64, 64)), nn.Linear(64, 8))
    casts = {cast.module: cast.count for cast in profiled(model, BF16, shape=(64,)).casts}
    assert casts["0.0"] > casts["1"]
    assert set(casts) <= {"0.0", "1", None}


def test_profiling_leaves_the_model_as_it_was() -> None:
    calls: list[int] = []

    def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 32:  # 5 to warm up, at most 20 + 5 to be timed: this one is profiled
            raise RuntimeError("the step fails")
        return model(batch).mean()  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match="the step fails"):
        profiled(model, STOCK, steps=1000, loss=failing)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_steps_with_too_many_events_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amptune.measure.breakdown.profiler.MAX_EVENTS", 10)
    profile = profiled(classifier(), STOCK, steps=3, shape=(64,))
    assert profile.steps == 1


def test_a_compiled_model_is_profiled_without_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    profile = profiled(classifier(), Policy(compile="default"), shape=(64,))
    assert not profile.attributed
    assert {module.module for module in profile.modules} == {None}


def event(name: str, start: float, length: float, category: str = "cpu_op", /, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "tid": 1, "ts": start, "dur": length, "args": args}


def test_a_trace_links_kernels_to_operations_and_backward_to_forward() -> None:
    link = {"cat": "fwdbwd", "id": 7, "tid": 1}
    trace = read_trace(
        [
            event("aten::mm", 10.0, 5.0, **{"External id": 1, "Input Dims": [[2, 3], [3, 4], []]}),
            event("MmBackward0", 20.0, 5.0, **{"External id": 2}),
            event("sgemm", 12.0, 3.0, "kernel", **{"External id": 1}),
            event("Memcpy HtoD", 16.0, 1.0, "gpu_memcpy", **{"External id": 9}),
            {"ph": "s", "ts": 10.0, **link},
            {"ph": "f", "ts": 20.0, **link},
        ]
    )
    assert [(op.name, op.forward) for op in trace.ops] == [("aten::mm", None), ("MmBackward0", 1)]
    assert trace.ops[0].shapes == ((2, 3), (3, 4), ())
    assert [(kernel.name, kernel.op, kernel.compute) for kernel in trace.kernels] == [
        ("sgemm", 1, True),
        ("Memcpy HtoD", 9, False),
    ]


def test_only_the_steps_own_waiting_counts_as_synchronization() -> None:
    trace = read_trace(
        [
            event(STEP_RANGE, 10.0, 100.0, "user_annotation", **{"External id": 1}),
            event("cudaStreamSynchronize", 20.0, 5.0, "cuda_runtime"),
            event("cudaDeviceSynchronize", 111.0, 5.0, "cuda_runtime"),
        ]
    )
    assert trace.synchronizations == 1


def op(number: int, name: str, start_us: float, us: float, forward: int | None = None) -> Op:
    return Op(id=number, name=name, thread=0, start_us=start_us, us=us, forward=forward)


def test_the_slowest_module_comes_first_with_its_backward_pass() -> None:
    ops = (
        op(0, f"{MODULE_RANGE}small", 0.0, 10.0),
        op(1, "aten::mm", 1.0, 5.0),
        op(2, f"{MODULE_RANGE}large", 10.0, 10.0),
        op(3, "aten::mm", 11.0, 5.0),
        op(4, "autograd::engine::evaluate_function: MmBackward0", 30.0, 10.0),
        op(5, "MmBackward0", 30.5, 6.0, forward=3),
        op(6, "aten::mm", 31.0, 5.0),
        op(7, "aten::add_", 38.0, 1.0),
    )
    kernels = tuple(Kernel(name="gemm", start_us=10.0 * n, us=1000.0, op=n) for n in (1, 3, 6, 7))
    profile = distil([StepTrace(ops=ops, kernels=kernels)], device="cuda", step_ms=10.0)
    assert [module.module for module in profile.modules] == ["large", "small"]
    assert [module.ms for module in profile.modules] == pytest.approx([3.0, 1.0])


def test_times_on_a_cpu_are_those_of_operations_themselves_as_fast_as_without_the_profiler() -> None:
    ops = (
        op(0, STEP_RANGE, 0.0, 100.0),
        op(1, f"{MODULE_RANGE}a", 10.0, 40.0),
        op(2, "aten::mm", 20.0, 20.0),
        op(3, "MmBackward0", 50.0, 25.0, forward=2),
        op(4, "Optimizer.step#SGD.step", 80.0, 20.0),
        op(5, "aten::add_", 85.0, 10.0),
    )
    profile = distil([StepTrace(ops=ops)], device="cpu", step_ms=0.05)  # the profiler doubled it
    assert {module.module: module.ms for module in profile.modules} == pytest.approx({"a": 0.0325, None: 0.0075})
    assert profile.optimizer_ms == pytest.approx(0.01)


def test_kernels_on_two_streams_are_not_counted_twice() -> None:
    ops = (Op(id=0, name=f"{MODULE_RANGE}a", thread=0, start_us=0.0, us=9.0),)
    kernels = tuple(Kernel(name="k", start_us=s, us=u, op=0) for s, u in ((0.0, 4000.0), (1000.0, 2000.0), (3e3, 2e3)))
    profile = distil([StepTrace(ops=ops, kernels=kernels)], device="cuda", step_ms=10.0, host_ms=1.0)
    assert profile.gpu_busy_ms == pytest.approx(5.0)
    assert profile.gpu_idle_ms == pytest.approx(0.5 * profile.step_ms)
    (module,) = profile.modules
    assert module.module == "a"
    assert module.ms == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half>", "layout"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "tensor-core"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_nn_align2>", "tensor-core"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16", "tensor-core"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "tensor-core"),
        ("volta_fp16_s884cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1", "tensor-core"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>", "plain"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4", "plain"),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>", "plain"),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, c10::BFloat16>", "plain"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>", "other"),
    ],
)
def test_a_kernels_name_tells_what_it_is(name: str, kind: str) -> None:
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(("workload", "policy"), [("resnet50", "bf16"), ("bert_base", "bf16"), ("vgg16", "stock")])
def test_all_of_a_recorded_gpu_steps_time_is_accounted_for(workload: str, policy: str) -> None:
    profile = recorded(workload, policy)
    assert profile.gpu_busy_ms is not None
    assert sum(module.ms for module in profile.modules) + profile.optimizer_ms == pytest.approx(
        profile.gpu_busy_ms, rel=0.01
    )
    outside = sum(module.ms for module in profile.modules if module.module in (None, ""))
    assert outside < 0.1 * profile.gpu_busy_ms


@pytest.mark.parametrize(
    ("workload", "policy", "codes"),
    [
        ("densenet161", "bf16", ["launch-bound", "layout-transposes"]),
        ("seresnext50", "bf16", ["launch-bound", "layout-transposes"]),
        ("vgg16", "bf16", ["slow-operation", "layout-transposes"]),
        ("vgg16", "bf16-channels-last", ["launch-bound", "unfused-optimizer"]),
        ("vgg16", "stock", ["no-tensor-cores", "unfused-optimizer", "layout-transposes"]),
        ("resnet50", "bf16", ["slow-operation", "layout-transposes"]),
        ("resnet50", "bf16-channels-last", ["slow-operation"]),
        ("resnet50", "ieee", ["no-tensor-cores"]),
        ("bert_base", "bf16", ["unaligned-matmul"]),
        ("gpt2", "bf16", ["unaligned-matmul"]),
        ("mlp3", "stock", ["no-tensor-cores", "unfused-optimizer"]),
        ("mlp3", "bf16", ["launch-bound", "unfused-optimizer", "casts"]),
        ("mlp3", "bf16-graphs", ["launch-bound", "unfused-optimizer"]),
        ("conv1", "stock", ["no-tensor-cores"]),
        ("conv1", "bf16", ["casts", "layout-transposes", "no-tensor-cores"]),
    ],
)
def test_recorded_gpu_steps_give_the_findings_they_should(workload: str, policy: str, codes: list[str]) -> None:
    assert [code for code in found_in(workload, policy) if code != "slowest-modules"] == codes


def test_the_findings_of_recorded_steps_name_what_is_to_blame() -> None:
    modules = {module.module: module.ms for module in recorded("vgg16", "bf16").modules}
    assert modules["avgpool"] == pytest.approx(13.9, abs=0.1)  # 13.7 of them backward
    assert found_in("vgg16", "bf16")["slow-operation"].module == "avgpool"
    assert found_in("vgg16", "stock")["no-tensor-cores"].module == "classifier.0"
    assert found_in("bert_base", "bf16")["unaligned-matmul"].figures["matmuls"][0]["n"] == 30522
    assert "multiples of 8" in found_in("conv1", "bf16")["layout-transposes"].message
