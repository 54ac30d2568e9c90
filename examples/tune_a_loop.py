"""A loop that amptune tunes as it stands: `amptune tune tune_a_loop.py`, then `python tune_a_loop.py`."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amptune

torch.manual_seed(0)
x = torch.randn(512, 16)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss_fn = nn.CrossEntropyLoss()

workload = amptune.Workload.from_loop(model, loader, loss_fn, optimizer)

if __name__ == "__main__":  # amptune imports this file, and must not train then
    tuned = amptune.apply("policy.yaml" if Path("policy.yaml").exists() else amptune.Policy(), model)
    optimizer = tuned.optimizer(optimizer)
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            with tuned.autocast():
                loss = loss_fn(tuned.model(tuned.batch(inputs)), targets)
            tuned.scaler.scale(loss).backward()
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
