"""A small network with its data, and the plain loop that other ways to train it are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.apply_policy import apply

POLICY = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="head"),))

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)
        self.head_dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        self.head_dtypes.add(out.dtype)
        return out


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(count: int = 4, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def train_plainly(policy: Policy, model: Net, data: Sequence[Batch]) -> list[float]:
    """The losses of the README's loop; the model is left trained, with its last gradients."""
    losses = []
    with apply(policy, model) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in data:
            optimizer.zero_grad()
            with tuned.autocast():
                loss = nn.functional.cross_entropy(tuned.model(tuned.batch(x)), y)
            tuned.scaler.scale(loss).backward()
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            losses.append(loss.item())
    return losses


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Bit for bit, under the same names."""
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
