"""Activation checkpointing: what is computed again in the backward pass is in the precision of the forward pass."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amptune


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


torch.manual_seed(0)
model = Net()

policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="blocks.1"),))
tuned = amptune.apply(policy, model)  # or amptune.apply("policy.yaml", model)
optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

x = torch.randn(32, 16)
y = x[:, :4].argmax(dim=1)
losses = []
for _ in range(20):
    with tuned.autocast():
        loss = nn.functional.cross_entropy(tuned.model(tuned.batch(x)), y)
    tuned.scaler.scale(loss).backward()
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
