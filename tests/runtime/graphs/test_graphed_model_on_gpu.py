from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import PolicyDriftWarning, apply
from amptune.runtime.graphs.dispatch import NOT_RECORDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = [
    Policy(),
    Policy(autocast="bf16", memory_format="channels_last", fused_optimizer=True),
    Policy(autocast="fp16", fused_optimizer=True),
    Policy(autocast="fp16", accumulate=2),
    Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).cuda()


def trained(policy: Policy, sizes: list[int], make: Callable[[], nn.Module] = net) -> tuple[list[float], Any, Any]:
    """(losses, weights and buffers, findings) of the README's loop, one step for each size."""
    model = make()
    losses = []
    with apply(policy, model, guard=False) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        torch.manual_seed(1)
        for size in sizes:
            for _ in range(tuned.accumulate):
                x = tuned.batch(torch.randn(size, 3, 16, 16, device="cuda"))
                with tuned.autocast():
                    loss = tuned.model(x).float().square().mean() / tuned.accumulate
                tuned.scaler.scale(loss).backward()
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(float(tuned.model(x).float().sum()))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return losses, state, tuned.findings


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def with_graphs(policy: Policy) -> Policy:
    return Policy(**{**dict(policy.departures()), "cuda_graphs": True})


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_training_is_that_of_the_plain_model(policy: Policy) -> None:
    sizes = [8, 8, 8, 5, 8, 8, 5, 8, 5, 8]
    torch.backends.cudnn.deterministic = True
    try:
        expected, weights, _ = trained(policy, sizes)
        losses, state, findings = trained(with_graphs(policy), sizes)
    finally:
        torch.backends.cudnn.deterministic = False
    assert not findings
    assert losses == expected
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor), name


def test_algorithms_are_chosen_before_anything_is_recorded() -> None:
    policy = Policy(autocast="fp16", memory_format="channels_last", cudnn_benchmark=True)
    expected, _, _ = trained(policy, [8, 8])
    losses, _, findings = trained(with_graphs(policy), [8, 8])
    assert not findings
    assert losses[0] == pytest.approx(expected[0], rel=1e-2)  # another algorithm may be chosen


class Waiting(nn.Module):
    """Its host waits for the device in each forward pass, which cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out if float(out.detach().abs().max().cpu()) < 1e6 else out / 2


class Masking(Waiting):
    """Asks whether there is anything to mask, as many a library does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.detach() > -2
        out: torch.Tensor = self.linear(x)
        return out if mask.all() else out * mask


def test_a_question_that_is_answered_otherwise_is_answered_by_the_model() -> None:
    gradients: list[Any] = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = Masking().cuda()
        with apply(Policy(cuda_graphs=graphs), model) as tuned:
            for step in range(12):
                tuned.model(torch.full((8, 4), -3.0 if step in (5, 9) else 1.0, device="cuda")).sum().backward()
            assert not tuned.findings
            gradients.append(model.linear.weight.grad)
    assert torch.equal(*gradients)


class Synchronizing(Waiting):
    """The same in a way that shows while it is recorded, and not before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        out: torch.Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("make", [Waiting, Synchronizing])
def test_what_cannot_be_recorded_trains_all_the_same(make: Callable[[], Waiting]) -> None:
    model = make().cuda()
    x = torch.randn(8, 4, device="cuda")
    with apply(Policy(cuda_graphs=True), model) as tuned:
        tuned.model(x).sum().backward()
        model.zero_grad()
        stream = torch.cuda.current_stream()
        with pytest.warns(PolicyDriftWarning, match="it is not recorded as a CUDA graph"):
            tuned.model(x).sum().backward()
        assert torch.cuda.current_stream() == stream
        first = model.linear.weight.grad
        assert first is not None
        expected = first.clone()
        model.zero_grad()
        tuned.model(x).sum().backward()
        assert torch.equal(expected, model.linear.weight.grad)  # type: ignore[arg-type]
        assert [finding.code for finding in tuned.findings] == [NOT_RECORDED]
    # nothing is left that would be in the way
    before = reserved()
    torch.rand(3, device="cuda")
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    many = torch.empty(2**28, device="cuda")
    many.record_stream(other)
    del many
    assert reserved() <= before + 2**26
    torch.cuda.manual_seed(5)
    assert torch.cuda.get_rng_state().numel()
    with apply(Policy(cuda_graphs=True), net()) as tuned:
        for _ in range(3):
            tuned.model(torch.randn(8, 3, 16, 16, device="cuda")).sum().backward()
        assert not tuned.findings
        called: Any = tuned.model
        called.recordings.require_some()


def test_its_memory_is_given_back() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    before = reserved()
    tuned = apply(Policy(cuda_graphs=True), model)
    for _ in range(2):
        tuned.model(torch.randn(32768, 1024, device="cuda")).sum().backward()
        model.zero_grad()
    held = reserved()
    tuned.undo()
    assert held > before + 2**29
    assert reserved() <= before + 2**28  # the workspaces of cuBLAS stay


def test_a_model_moved_to_the_gpu_later_is_recorded_there() -> None:
    model = nn.Linear(8, 8)
    with apply(Policy(cuda_graphs=True), model) as tuned, warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.model(torch.randn(4, 8)).sum().backward()
        model.cuda()
        for _ in range(2):
            tuned.model(torch.randn(4, 8, device="cuda")).sum().backward()
        called: Any = tuned.model
        called.recordings.require_some()


def test_parallel_training_reduces_what_is_replayed() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not export it by name
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        results = []
        for graphs in (False, True):
            model = net()
            with apply(Policy(autocast="bf16", cuda_graphs=graphs), model, guard=False) as tuned:
                parallel = DistributedDataParallel(tuned.model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                torch.manual_seed(1)
                for _ in range(6):
                    with tuned.autocast():
                        loss = parallel(torch.randn(8, 3, 16, 16, device="cuda")).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert not tuned.findings
            results.append(loss.item())
        assert results[0] == pytest.approx(results[1], rel=1e-3)
    finally:
        dist.destroy_process_group()
