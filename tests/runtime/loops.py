"""Models and ways to run training loops under the guard, for its tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned

FP16 = Policy(autocast="fp16")
Loop = Callable[[Tuned, nn.Module], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.stem(x).mean((2, 3)))
        return out


def images(rows: int = 4, size: int = 6) -> torch.Tensor:
    return torch.randn(rows, 3, size, size)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_of(tuned: Tuned, x: torch.Tensor | None = None) -> Any:
    with tuned.autocast():
        return tuned.model(tuned.batch(images() if x is None else x)).float().square().mean()


def finish(tuned: Tuned, *optimizers: Any) -> None:
    """What follows the backward pass in the README's loop."""
    for optimizer in optimizers:
        tuned.scaler.step(optimizer)
    tuned.scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


def train(tuned: Tuned, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        tuned.scaler.scale(loss_of(tuned)).backward()
        finish(tuned, optimizer)


def repeated(step: Callable[[Tuned, nn.Module, Any, torch.Tensor], object]) -> Loop:
    """A loop of four such steps."""

    def loop(tuned: Tuned, model: nn.Module) -> None:
        optimizer = tuned.optimizer(sgd(model))
        for _ in range(4):
            step(tuned, tuned.model, optimizer, tuned.batch(images()))

    return loop


def run(loop: Loop, policy: Policy, model: nn.Module | None = None, **how: Any) -> tuple[Tuned, list[Any]]:
    """What is warned of while the loop runs: `warnings.WarningMessage`s."""
    torch.manual_seed(0)
    model = Net() if model is None else model
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tuned = apply(policy, model, **how)
        loop(tuned, model)
        tuned.undo()
    return tuned, said


def codes(tuned: Tuned) -> Sequence[str]:
    return [finding.code for finding in tuned.findings]
