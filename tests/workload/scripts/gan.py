"""Two networks against each other, each with an optimizer: no script of one model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
generator, discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
for_g, for_d = torch.optim.Adam(generator.parameters()), torch.optim.Adam(discriminator.parameters())
for _ in range(100):
    for (real,) in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16):
        fake = generator(torch.randn(16, 4))
        for_d.zero_grad()
        (discriminator(fake.detach()).mean() - discriminator(real).mean()).backward()
        for_d.step()
        for_g.zero_grad()
        (-discriminator(fake).mean()).backward()
        for_g.step()
