"""Accelerate: an Accelerator built as the policy says, and the policy applied before its prepare()."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amptune
from amptune.runtime.integrations.accelerate import accelerator_kwargs, apply_before_prepare

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
x = torch.randn(256, 16)
data = TensorDataset(x, x[:, :4].argmax(dim=1))

policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="2"),), batch_size=16, accumulate=2)
accelerator = Accelerator(**accelerator_kwargs(policy))  # or accelerator_kwargs("policy.yaml")
tuned = apply_before_prepare(policy, model, accelerator)
optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = DataLoader(data, batch_size=tuned.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(tuned.model, optimizer, loader)

losses = []
for _ in range(4):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(tuned.batch(inputs)), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
