"""A deep network whose blocks compute their activations again in the backward pass."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.tail = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant="reentrant" in sys.argv)
        return self.tail(x)


def main() -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(100_000):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
