"""Two models, two policies, two optimizers, and a gradient penalty (WGAN-GP); one scaler serves both."""

import torch
from torch import nn

import amptune

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 1))

tuned_g = amptune.apply(amptune.Policy(autocast="bf16"), generator)
# The penalty is a gradient of a gradient: the layer it is taken at stays in FP32.
tuned_c = amptune.apply(amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="0"),)), critic)
optimizer_g = tuned_g.optimizer(torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.0, 0.9)))
optimizer_c = tuned_c.optimizer(torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.0, 0.9)))
scaler = tuned_c.scaler

distances = []
for _ in range(300):
    real = torch.randn(64, 2) + torch.tensor([4.0, 0.0])
    noise = torch.randn(64, 8)

    with tuned_g.autocast():
        fake = generator(noise).detach().float()
    between = (real + torch.rand(64, 1) * (fake - real)).requires_grad_()
    with tuned_c.autocast():
        score = critic(between).sum()
    (gradient,) = torch.autograd.grad(scaler.scale(score), between, create_graph=True)
    gradient = gradient / scaler.get_scale()
    with tuned_c.autocast():
        loss_c = critic(fake).mean() - critic(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()
    scaler.scale(loss_c).backward()
    scaler.step(optimizer_c)
    optimizer_c.zero_grad()

    with tuned_g.autocast():
        fake = generator(noise)
        loss_g = -critic(fake).mean()
    scaler.scale(loss_g).backward()
    scaler.step(optimizer_g)
    scaler.update()
    optimizer_g.zero_grad()
    optimizer_c.zero_grad()
    distances.append((fake.float().mean(dim=0) - real.mean(dim=0)).norm().item())
print(f"distance {distances[0]:.4f} -> {distances[-1]:.4f}")
