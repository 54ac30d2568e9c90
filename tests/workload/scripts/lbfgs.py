"""An optimizer with a closure, and second derivatives."""

import torch
from torch import nn

net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
opt = torch.optim.LBFGS(net.parameters(), max_iter=5)
x = torch.rand(100, 2, requires_grad=True)


def closure():
    opt.zero_grad()
    u = net(x)
    g = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    l = (g.pow(2).sum(1) - 1).pow(2).mean() + u.mean() ** 2
    l.backward()
    return l


for i in range(10000):
    opt.step(closure)
