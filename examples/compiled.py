"""torch.compile: a policy with `compile:` gives a compiled `tuned.model`; yours can be compiled before or after too."""

import torch
from torch import nn

import amptune

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)

policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="2"),))
tuned = amptune.apply(policy, model)  # or amptune.apply("policy.yaml", model)
backend = "inductor" if device == "cuda" else "aot_eager"  # Inductor wants a C++ compiler on a CPU
compiled = torch.compile(tuned.model, backend=backend, fullgraph=True)
optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

x = torch.randn(32, 16, device=device)
y = x[:, :4].argmax(dim=1)
losses = []
for _ in range(20):
    with tuned.autocast():
        loss = nn.functional.cross_entropy(compiled(tuned.batch(x)), y)
    tuned.scaler.scale(loss).backward()
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
