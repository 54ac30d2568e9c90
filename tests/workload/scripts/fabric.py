"""A loop under Lightning's Fabric, as people write it, with accumulation."""

import torch, lightning as L
from torch.utils.data import DataLoader, TensorDataset

f = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
f.launch()
m = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
o = torch.optim.SGD(m.parameters(), 0.1)
m, o = f.setup(m, o)
dl = f.setup_dataloaders(DataLoader(TensorDataset(torch.randn(640, 8), torch.randint(3, (640,))), 16, shuffle=True))
for e in range(100):
    for i, (x, y) in enumerate(dl):
        acc = i % 2 != 1
        with f.no_backward_sync(m, enabled=acc):
            l = torch.nn.functional.cross_entropy(m(x), y)
            f.backward(l)
        if not acc:
            o.step()
            o.zero_grad()
