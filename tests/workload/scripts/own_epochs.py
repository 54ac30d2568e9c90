"""An image classifier whose loop divides by what is left of an epoch, and cannot go on behind its end."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
    for _ in range(10_000):
        loader = DataLoader(data, 8, shuffle=True)
        for at, (x, y) in enumerate(loader):
            left = 1 / (len(loader) - at)
            optimizer.zero_grad()
            (left * nn.functional.cross_entropy(net(x), y)).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            correct = sum(int((net(x).argmax(1) == y).sum()) for x, y in DataLoader(data, 32))
        net.train()
        print("correct", correct)


if __name__ == "__main__":
    main()
