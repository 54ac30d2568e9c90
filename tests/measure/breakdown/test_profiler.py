"""Profiling a training step: on this CPU for real, and on a GPU as it was recorded there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import CPU, Checkpointed, workload_of
from recorded_steps import found_in, recorded
from torch import nn

from amptune.measure.bench.bench import Bench
from amptune.measure.breakdown.profiler import profile_step
from amptune.measure.breakdown.step_trace import STEP_RANGE, read_trace
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
            event(STEP_RANGE, 10.0, 100.0, "user_annotation", **{"External id": 3}),
            event("cudaStreamSynchronize", 20.0, 5.0, "cuda_runtime"),
            event("cudaDeviceSynchronize", 111.0, 5.0, "cuda_runtime"),
        ]
    )
    assert trace.synchronizations == 1, "in the step itself"
    assert {(op.name, op.forward) for op in trace.ops} == {("aten::mm", None), (STEP_RANGE, None), ("MmBackward0", 1)}
    assert trace.ops[0].shapes == ((2, 3), (3, 4), ())
    assert [(kernel.name, kernel.op, kernel.compute) for kernel in trace.kernels] == [
        ("sgemm", 1, True),
        ("Memcpy HtoD", 9, False),
    ]


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


def test_all_time_of_recorded_gpu_steps_is_accounted_for_and_the_modules_to_blame_are_named() -> None:
    profile = recorded("vgg16", "bf16")
    modules = {module.module: module.ms for module in profile.modules}
    assert sum(modules.values()) + profile.optimizer_ms == pytest.approx(profile.gpu_busy_ms, rel=0.01)
    assert modules.get(None, 0) + modules.get("", 0) < 0.1 * sum(modules.values())
    assert modules["avgpool"] == pytest.approx(13.9, abs=0.1)  # 13.7 of them backward
    assert found_in("vgg16", "bf16")["slow-operation"].module == "avgpool"
    assert found_in("vgg16", "stock")["no-tensor-cores"].module == "classifier.0"
    assert found_in("bert_base", "bf16")["unaligned-matmul"].figures["matmuls"][0]["n"] == 30522
    assert "multiples of 8" in found_in("conv1", "bf16")["layout-transposes"].message


def test_products_in_half_are_told_from_those_in_fp32() -> None:
    for policy, in_half in (("bf16", True), ("stock", False)):
        assert {product.in_half for product in recorded("conv1", policy).products} == {in_half}
        assert {product.in_half for product in recorded("mlp3", policy).products} == {in_half}
    assert {product.in_half for product in recorded("mlp3", "bf16-graphs").products} == {None}, "nobody knows"
