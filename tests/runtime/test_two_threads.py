"""One thread trains and another evaluates the same model: a pass changes nothing that the other one sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amptune
from amptune.policy.settings import HalfRule, Policy
from amptune.runtime.tuned import Tuned


class Observed(nn.Module):
    """A layer during whose pass another thread may look at the model; it counts its passes, as modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)
        self.look: Callable[[], object] = lambda: None
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.look()
        return x * self.weight if self._modules.get("norm") is None else self.norm(x * self.weight)


def in_a_thread(do: Callable[[], Any]) -> Any:
    given: list[Any] = []
    thread = threading.Thread(target=lambda: given.append(do()))
    thread.start()
    thread.join()
    return given[0]


def loss_of(tuned: Tuned) -> Any:
    with tuned.autocast():
        return tuned.model(torch.rand(3, 4)).float().square().mean()


@pytest.mark.parametrize(
    "policy",
    [Policy(autocast="bf16", half_modules=(HalfRule(path="0"),)), Policy(autocast="bf16", checkpoint=("0",))],
    ids=str,
)
def test_parameters_and_buffers_stay_the_models_own_in_each_pass(policy: Policy) -> None:
    model = nn.Sequential(layer := Observed(), nn.Linear(4, 4))
    if policy.half_modules:
        del layer.norm
    tensors, seen = [*model.parameters(), *model.buffers()], []
    layer.look = lambda: seen.append(in_a_thread(lambda: [*model.parameters(), *model.buffers()]))
    with amptune.apply(policy, model) as tuned:
        loss = loss_of(tuned)
        statistics = [one.clone() for one in model.buffers()]
        loss.backward()
        assert len(seen) == (1 if policy.half_modules else 2)
        for found in seen:
            assert all(one is other for one, other in zip(found, tensors, strict=True))
        assert all(map(torch.equal, model.buffers(), statistics))
        assert layer.passes == 1
        assert layer.weight.grad is not None
