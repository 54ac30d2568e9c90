"""A policy gradient: a step for each episode, and episodes of any length."""

from __future__ import annotations

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(100_000):
        chosen = []
        for _ in range(int(torch.randint(2, 60, ()))):
            action = torch.distributions.Categorical(logits=policy(torch.randn(1, 4)))
            chosen.append(action.log_prob(action.sample()))
        loss = -torch.cat(chosen).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
