"""The bench inside a worker, here in this process: what it restores, and what it accepts."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from alike import trained_alike
from benches import CPU, QUICK, Growing, Remembering, measured, workload_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from amptune import Policy
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.peak_memory import memory_for
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.results.outcome import Effort, Failure, Measurement
from amptune.policy.settings import STOCK, amp_recipe
from amptune.runtime.digest import model_digest


def image_of(value: object) -> object:
    """A value that is equal for equal tensors, containers and modules with all their attributes."""
    match value:
        case torch.Tensor():
            return str(value.dtype), value.tolist()
        case nn.Module():
            return {name: image_of(part) for name, part in vars(value).items() if "hooks" not in name}
        case dict():
            return {name: image_of(part) for name, part in value.items()}
        case list() | tuple() | deque():
            return [image_of(part) for part in value]
        case _:
            return repr(value)


PIECES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "norm": lambda: nn.BatchNorm1d(8),
    "in eval mode": lambda: nn.BatchNorm1d(8).eval(),
    "dropout": lambda: nn.Dropout(0.5),
    "lazy": lambda: nn.LazyLinear(8),
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "attributes": Remembering,
    "buffers": Growing,
}
OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    lambda weights: torch.optim.SGD(weights, lr=1e-5, momentum=0.9),
    lambda weights: torch.optim.Adam(weights, lr=1e-3, eps=1e-4),  # not 0 in half
)
HALF = Policy(weights="half", keep_batchnorm_fp32=True)
POLICIES = (STOCK, amp_recipe("bf16"), HALF, replace(HALF, master_weights=True))
GLANCE = Effort(warmup_s=0.0, measure_s=0.0, min_steps=1)


@given(
    st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
    st.sampled_from(OPTIMIZERS),
    st.sampled_from(POLICIES),
)
@example(["attributes", "lazy"], OPTIMIZERS[0], STOCK)  # whose shapes come from a forward pass, which remembers
@settings(max_examples=10)
def test_a_trial_leaves_the_model_bit_for_bit_as_it_was_and_the_next_trains_alike(
    pieces: list[str], optimizer: Callable[..., torch.optim.Optimizer], policy: Policy
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(PIECES[name]() for name in pieces), nn.Linear(8, 1))

    bench = Bench(workload_of(build, optimizer=lambda model: optimizer(model.parameters())), CPU)
    before = image_of(bench.model)
    first, stock, second = (bench.measure(one, GLANCE) for one in (policy, STOCK, policy))
    assert isinstance(first, Measurement), first
    assert isinstance(stock, Measurement), stock
    assert isinstance(second, Measurement), second
    assert trained_alike(first, second)
    assert trained_alike(first, stock) == (policy == STOCK)
    assert all(parameter.grad is None for parameter in bench.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in bench.model.modules())
    with bench.on_device(STOCK) as (_, stepper):
        assert image_of(bench.model) == before
        if "buffers" not in pieces:  # a model that made a buffer is built anew for the next trial
            stepper()
            bench.restart()
            assert image_of(bench.model) == before


@pytest.mark.parametrize(
    ("model", "parts", "words"),
    [
        (lambda: nn.LazyLinear(3), {"loss": None, "step": lambda *_: None}, r"run one forward pass in model\(\)"),
        (
            lambda: torch.compile(nn.Linear(8, 2), backend="eager"),
            {},
            r"give it before torch\.compile",
        ),
    ],
)
def test_a_model_that_cannot_be_measured_is_a_clear_error(model: Any, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        Bench(workload_of(model, **parts), CPU)


@pytest.mark.parametrize(
    ("parts", "policy", "kind", "words"),
    [
        ({}, Policy(cuda_graphs=True), "unsupported", "nothing is recorded as a CUDA graph"),
        ({"batch": lambda _: torch.randn(4, 8)}, Policy(batch_size=64), "error", "same shapes as batch(4)"),
        ({"loss": lambda m, b: m(b).float().square().sum() * 1e30}, amp_recipe("fp16"), "nonfinite", ""),
        ({"loss": lambda *_: 3.0}, STOCK, "error", "loss returned float, not a scalar tensor"),
        ({"loss": lambda model, batch: model(batch)}, STOCK, "error", "loss returned a tensor of shape (4, 3)"),
    ],
)
def test_a_trial_that_cannot_be_says_why(parts: dict[str, Any], policy: Policy, kind: str, words: str) -> None:
    bench = Bench(workload_of(nn.Linear(8, 3), **parts), CPU)
    bench.measure(STOCK, QUICK)  # with the usual batches
    outcome = bench.measure(policy, QUICK)
    assert isinstance(outcome, Failure)
    assert outcome.kind == kind
    assert words in outcome.message


@pytest.mark.parametrize("policy", [STOCK, amp_recipe("fp16")], ids=str)
def test_gradients_are_clipped_when_they_are_unscaled_and_their_norm_told_as_it_was(policy: Policy) -> None:
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        norms.append(float(nn.utils.get_total_norm([one.grad for one in optimizer.param_groups[0]["params"]])))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made.register_step_pre_hook(note)
        return made

    def norm(policy: Policy, **parts: Any) -> float:
        loss = lambda m, x: m(x).float().square().mean() / 16  # noqa: E731  # small: none overflows
        outcome = measured(Bench(workload_of(lambda: nn.Linear(8, 3), loss=loss, **parts), CPU), policy)
        assert outcome.gradient_norm is not None
        return outcome.gradient_norm

    clipped, plain = norm(policy, optimizer=optimizer, clip=1e-3), norm(STOCK)
    assert norms == pytest.approx([1e-3] * len(norms), rel=0.01)
    assert clipped == pytest.approx(plain, rel=0.01)  # as the model has it in the first step
    assert plain > 1e-2


def test_inspection_counts_what_the_leaves_compute_of_the_model_before_it_trains() -> None:
    assert inspect_model(Bench(workload_of(Growing), CPU), "digest").model_digest == model_digest(Growing())
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.Flatten(), nn.Linear(8 * 16, 5))
    subject = inspect_model(Bench(workload_of(model, (3, 4, 4)), CPU), "digest")
    conv, _, linear = subject.leaves
    assert conv.flops == 2 * (4 * 8 * 16) * (3 * 9)
    assert linear.flops == 2 * (4 * 5) * (8 * 16)
    assert linear.cast_numel == 4 * 8 * 16 + 8 * 16 * 5 + 5
    assert [leaf.called for leaf in subject.leaves] == [0, 1, 2]
    assert subject.convolution_dims == {2}


@pytest.mark.parametrize("error", [RuntimeError("not in this step"), SystemExit("not in this step")])
def test_a_step_that_fails_leaves_the_inspection_to_the_baselines_trial(error: BaseException) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise error

    subject = inspect_model(Bench(workload_of(nn.Linear(8, 3), loss=fail), CPU), "digest")
    assert subject.leaves[0].called is None
    assert subject.parameters == 27


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel's high-water mark stays")
def test_on_a_cpu_what_a_trial_has_freed_is_no_memory_of_the_next() -> None:
    meter = memory_for(CPU)
    torch.ones(28 * 2**18)  # after which glibc has 28 MiB and less from its heap, and keeps them there
    meter.reset()
    before, _ = meter.peak_mib()
    held = [torch.ones(2**18) for _ in range(200)]
    most, _ = meter.peak_mib()
    last = held.pop()  # which holds the heap's end
    held.clear()
    meter.reset()
    after, _ = meter.peak_mib()
    assert most > before + 190
    assert after < before + 60
    assert last.numel() == 2**18


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_is_given_back_after_a_trial() -> None:
    device = torch.device("cuda", 0)
    bench = Bench(workload_of(nn.Linear(4096, 4096), (4096,), batch_size=1024), device)
    outcome = measured(bench, amp_recipe("bf16"))
    assert outcome.peak_allocated_mib > 64
    assert torch.cuda.memory_reserved() < 2**20 * 16
    assert next(bench.model.parameters()).device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_running_out_of_device_memory_is_typed_and_survived() -> None:
    workload = workload_of(
        nn.Linear(64, 64), (64,), loss=lambda model, batch: (model(batch) * torch.empty(2**40, device="cuda")).mean()
    )
    bench = Bench(workload, torch.device("cuda", 0))
    outcome = bench.measure(STOCK, QUICK)
    assert not isinstance(outcome, Measurement)
    assert outcome.kind == "oom"


def test_a_block_begins_with_batches_and_random_numbers_that_its_warm_up_did_not_see() -> None:
    """What a policy pays for each new batch, as a graph of its own, it pays in the block too."""
    seen: list[tuple[float, float]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        seen.append((float(batch.sum()), float(torch.rand(()))))
        return model(batch).square().mean()

    bench = Bench(workload_of(nn.Linear(8, 2), loss=loss), CPU)
    for _ in range(2):  # busy machine or not: no block is repeated that is over at once
        bench.measure(STOCK, Effort(warmup_s=0.01, measure_s=0.0, min_steps=8, max_steps=8))
    half = len(seen) // 2
    block = seen[-8:]
    assert len(set(block)) == 8
    assert seen.index(block[0]) < half, "all policies are timed on the same batches, with the same random numbers"
    first = seen.index(block[0])
    assert not set(block) & set(seen[:first]), "and the warm-up saw others"


def test_batches_changed_in_place_do_not_leak_into_the_next_trial() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch.mul_(0.9)).square().mean().reshape(1)

    bench = Bench(workload_of(nn.Linear(8, 2), loss=loss), CPU)
    assert trained_alike(measured(bench), measured(bench))
