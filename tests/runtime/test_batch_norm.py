from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from loops import FP16, Net, codes, finish, images, loss_of, sgd, train
from torch import nn

from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.batch_norm import FiniteStatistics
from amptune.runtime.tuned import Tuned


def overflow(tuned: Tuned, optimizer: torch.optim.Optimizer) -> None:
    """A step whose forward overflows, which the scaler skips."""
    tuned.scaler.scale(loss_of(tuned, images() * 1e6)).backward()
    finish(tuned, optimizer)


def statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if "running" in name]


def are_finite(model: nn.Module) -> bool:
    return all(bool(one.isfinite().all()) for one in statistics(model))


@pytest.mark.parametrize("fused", [False, True])
def test_protected_statistics_become_what_they_were(fused: bool) -> None:
    model = Net()
    policy = Policy(autocast="fp16", fused_optimizer=fused)
    with apply(policy, model, protect_batch_norm=True, guard=True) as tuned:
        optimizer = tuned.optimizer(sgd(model))
        overflow(tuned, optimizer)
        assert [set(tensor.tolist()) for tensor in statistics(model)] == [{0}, {1}]
        train(tuned, optimizer, steps=2)
        before = statistics(model)
        overflow(tuned, optimizer)
        assert all(map(torch.equal, statistics(model), before))
        train(tuned, optimizer)
        assert not any(map(torch.equal, statistics(model), before))
        assert are_finite(model)
        assert codes(tuned) == []
    overflow(tuned, optimizer)
    assert tuned.scaler.statistics is None


def test_finite_numbers_of_a_module_that_overflowed_stay() -> None:
    model = nn.BatchNorm1d(3)
    kept = FiniteStatistics(model)
    model.get_buffer("running_mean").copy_(torch.tensor([1.0, float("nan"), 2.0]))
    kept.restore()
    assert model.get_buffer("running_mean").tolist() == [1, 0, 2]


def test_statistics_that_move_or_change_their_precision_are_followed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(5).double())
    kept = FiniteStatistics(model)
    model.half()
    model[0].get_buffer("running_var").fill_(float("inf"))
    kept.restore()
    assert {str(tensor.dtype) for tensor in statistics(model)} == {"torch.float16"}
    assert model[0].get_buffer("running_var").tolist() == [1, 1, 1]
    model.append(nn.BatchNorm1d(7))
    kept.restore()
    assert are_finite(model)


def test_neither_a_copy_of_the_scaler_nor_one_of_another_precision_protects_a_model() -> None:
    with apply(FP16, Net(), protect_batch_norm=True) as tuned:
        copied: Any = pickle.loads(pickle.dumps(tuned.scaler))
    with apply(Policy(autocast="bf16"), Net(), protect_batch_norm=True) as tuned:
        assert copied.statistics is tuned.scaler.statistics is None
    FiniteStatistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))).restore()
