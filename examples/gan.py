"""Two networks, two optimizers and a gradient penalty (WGAN-GP) as one step, which a GPU replays as one CUDA graph."""

import torch
from torch import nn

import amptune

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 1))
model = nn.ModuleDict({"generator": generator, "critic": critic}).to(device)

# The penalty is a gradient of a gradient: the layer it is taken at stays in FP32.
rules = (amptune.Fp32Rule(path="critic.0"),)
policy = amptune.Policy(
    autocast="bf16", fp32_modules=rules, fused_optimizer=True, cuda_graphs="step" if device == "cuda" else False
)
tuned = amptune.apply(policy, model)  # or amptune.apply("policy.yaml", model)
optimizers = [
    tuned.optimizer(torch.optim.Adam(part.parameters(), lr=1e-2, betas=(0.0, 0.9))) for part in (critic, generator)
]


def step(tuned, model, optimizers, real):
    critic, generator = model["critic"], model["generator"]
    of_critic, of_generator = optimizers
    noise = torch.randn(len(real), 8, device=real.device)
    with tuned.autocast():
        fake = generator(noise)
    ahead = fake.detach().float()
    between = (real + torch.rand(len(real), 1, device=real.device) * (ahead - real)).requires_grad_()
    with tuned.autocast():
        score = critic(between).sum()
    (gradient,) = torch.autograd.grad(score, between, create_graph=True)
    with tuned.autocast():
        loss = critic(ahead).mean() - critic(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()
    tuned.scaler.scale(loss).backward()
    tuned.scaler.step(of_critic)
    with tuned.autocast():
        fooled = -critic(fake).mean()
    tuned.scaler.scale(fooled).backward()
    tuned.scaler.step(of_generator)
    tuned.scaler.update()
    for one in optimizers:
        one.zero_grad()
    return {"loss": loss, "distance": (ahead.mean(dim=0) - real.mean(dim=0)).norm()}


train = tuned.training_step(step=step, optimizer=optimizers)
distances = []
for _ in range(300):
    real = torch.randn(64, 2) + torch.tensor([4.0, 0.0])
    distances.append(train(real.to(device))["distance"])
print(f"distance {distances[0]:.4f} -> {distances[-1]:.4f}")
