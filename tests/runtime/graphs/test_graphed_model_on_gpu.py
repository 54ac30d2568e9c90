"""What the hard cases do not show of recorded passes on a GPU: what a recording that failed leaves, and late moves."""

from __future__ import annotations

import gc
import warnings
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


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def loss_of(model: nn.Module, policy: Policy, steps: int = 2) -> float:
    """The loss of the last of some steps, all of whose passes can be recorded."""
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)).cuda()
    with apply(policy, model) as tuned:
        for _ in range(steps):
            with tuned.autocast():
                loss = tuned.model(tuned.batch(x)).float().square().mean()
            tuned.scaler.scale(loss).backward()
        assert not tuned.findings
        called: Any = tuned.model
        assert not policy.cuda_graphs or len(called.recordings) == 1
    return float(loss.detach())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 4)).cuda()


def test_algorithms_are_chosen_before_anything_is_recorded() -> None:
    plain, recorded = (
        Policy(autocast="fp16", memory_format="channels_last", cudnn_benchmark=True, cuda_graphs=graphs)
        for graphs in (False, True)
    )
    assert loss_of(net(), recorded) == pytest.approx(loss_of(net(), plain), rel=1e-2)  # another one may be chosen


class Synchronizing(nn.Linear):
    """Its host waits for the device in a way that shows while it is recorded, and not before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return super().forward(x)


def test_what_cannot_be_recorded_trains_all_the_same_and_leaves_nothing_that_is_in_the_way() -> None:
    model, x = Synchronizing(4, 4).cuda(), torch.randn(8, 4, device="cuda")
    stream = torch.cuda.current_stream()
    with apply(Policy(cuda_graphs=True), model) as tuned:
        tuned.model(x).sum().backward()
        model.zero_grad()
        with pytest.warns(PolicyDriftWarning, match="it is not recorded as a CUDA graph"):
            tuned.model(x).sum().backward()
        gradients = [model.weight.grad]
        model.zero_grad()
        tuned.model(x).sum().backward()
        gradients.append(model.weight.grad)
        assert torch.cuda.current_stream() == stream
        assert torch.equal(*gradients)  # type: ignore[arg-type]
        assert [finding.code for finding in tuned.findings] == [NOT_RECORDED]
    before = reserved()
    torch.rand(3, device="cuda")
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    many = torch.empty(2**28, device="cuda")
    many.record_stream(other)
    del many
    assert reserved() <= before + 2**26
    torch.cuda.manual_seed(5)
    assert torch.cuda.get_rng_state().numel()
    loss_of(net(), Policy(cuda_graphs=True))


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
