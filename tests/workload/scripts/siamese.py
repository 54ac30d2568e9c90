"""Two networks under one optimizer, one of them called twice."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

enc = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
head = nn.Linear(64, 1)
opt = torch.optim.Adam(list(enc.parameters()) + list(head.parameters()), 1e-3)
bce = nn.BCEWithLogitsLoss()
dl = DataLoader(TensorDataset(torch.randn(320, 16), torch.randn(320, 16), torch.rand(320)), 32, shuffle=True)
for e in range(1000):
    for a, b, y in dl:
        loss = bce(head(torch.cat([enc(a), enc(b)], 1)).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
