"""What half weights do on a GPU alone: cuDNN's mixed BatchNorm, fused kernels, CUDA graphs, moving between devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_half_weights import O2, O3, adamw, batches, momentum, net, same, state
from torch import nn

from amptune.policy.settings import LossScale
from amptune.runtime.apply_policy import apply

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def losses_of(tuned: Any, optimizer: torch.optim.Optimizer, steps: int = 20) -> list[float]:
    losses = []
    for x, y in batches(1) * steps:
        loss = nn.functional.cross_entropy(tuned.model(tuned.batch(x.cuda())), y.cuda())
        tuned.scaler.scale(loss).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("policy", [O2, O3], ids=["O2", "O3"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_it_trains_after_the_model_was_moved_and_comes_back(policy: Any, memory_format: Any) -> None:
    model = net()
    with apply(replace(policy, memory_format=memory_format), model) as tuned:
        model.cuda()
        losses = losses_of(tuned, tuned.optimizer(momentum(model.parameters())))
        saved = state(model)
    assert losses[-1] < 0.5 * losses[0]
    assert same(state(model), saved)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("init", [1024.0, 2.0**30])
def test_fused_masters_train_as_others_do(init: float) -> None:
    found = {}
    for fused in (False, True):
        model = net().cuda()
        with apply(replace(O2, fused_optimizer=fused, loss_scale=LossScale(init=init)), model) as tuned:
            optimizer = tuned.optimizer(adamw(model.parameters()))
            assert optimizer.param_groups[0]["fused"] is (fused or None)
            found[fused] = losses_of(tuned, optimizer), tuned.scaler.get_scale()
            assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}
    assert found[True][0] == pytest.approx(found[False][0], rel=0.02, abs=1e-3)
    assert found[True][1] == found[False][1]


def test_a_step_with_masters_is_captured_in_a_cuda_graph() -> None:
    model = net().cuda()
    x, y = (tensor.cuda() for tensor in batches(1)[0])
    with apply(replace(O2, loss_scale=LossScale(init=1, static=True)), model) as tuned:
        optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True))

        def step() -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss: Any = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm_up = [step().item() for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(20):
            graph.replay()
        assert loss.item() < 0.5 * warm_up[0]
        assert torch.equal(model.state_dict()["4.weight"].half(), model.get_parameter("4.weight"))


def test_half_weights_take_less_memory_than_fp32() -> None:
    def peak(policy: Any) -> int:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        torch.cuda.reset_peak_memory_stats()
        with apply(policy, model, guard=False) as tuned:  # without a scaler, which the guard would miss
            torch.cuda.empty_cache()
            optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(3):
                tuned.model(torch.randn(16384, 1024, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return torch.cuda.max_memory_allocated()

    stock, o2, o3 = peak(replace(O3, weights="fp32")), peak(replace(O2, loss_scale=None)), peak(O3)
    assert o3 < o2 < stock
