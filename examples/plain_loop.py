"""The plain loop: gradients accumulated over micro-batches, and clipped."""

import torch
from torch import nn

import amptune

torch.manual_seed(0)
model = nn.Sequential()
model.add_module("body", nn.Sequential(nn.Linear(16, 64), nn.ReLU()))
model.add_module("head", nn.Linear(64, 4))

policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="head"),), batch_size=32, accumulate=2)
tuned = amptune.apply(policy, model)  # or amptune.apply("policy.yaml", model)
optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

x = torch.randn(tuned.batch_size, 16)
y = x[:, :4].argmax(dim=1)


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


train = tuned.training_step(loss, optimizer, clip=1.0)
losses = [train((x, y)).item() for _ in range(40)]
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
