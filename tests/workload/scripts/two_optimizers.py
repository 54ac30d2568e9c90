"""Two optimizers for one model, compiled by the script, and no loader."""

import torch
from torch import nn

m = nn.Sequential(nn.Linear(16, 32, bias=True), nn.ReLU(), nn.Linear(32, 8))
m = torch.compile(m)
o1 = torch.optim.SGD([p for p in m.parameters() if p.ndim == 2], 0.01, momentum=0.9)
o2 = torch.optim.Adam([p for p in m.parameters() if p.ndim < 2], 1e-3)
for s in range(100000):
    x, y = torch.randn(32, 16), torch.randint(8, (32,))
    l = nn.functional.cross_entropy(m(x), y)
    l.backward()
    for o in (o1, o2):
        o.step()
    m.zero_grad(set_to_none=True)
