"""Deep Q-learning as people write it: a replay memory, a target network that follows."""

import random, collections, torch
from torch import nn


class Q(nn.Module):
    def __init__(s):
        super().__init__()
        s.f = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(s, x):
        return s.f(x)


dev = "cuda" if torch.cuda.is_available() else "cpu"
policy, target = Q().to(dev), Q().to(dev)
target.load_state_dict(policy.state_dict())
opt = torch.optim.AdamW(policy.parameters(), 1e-4, amsgrad=True)
mem = collections.deque(maxlen=1000)
state = torch.zeros(1, 4, device=dev)
eps = 0.5
for t in range(200000):
    with torch.no_grad():
        action = (
            policy(state).max(1).indices.view(1, 1)
            if random.random() > eps
            else torch.tensor([[random.randrange(2)]], device=dev)
        )
    nxt = torch.randn(1, 4, device=dev)
    mem.append((state, action, nxt, torch.tensor([random.random()], device=dev)))
    state = nxt
    if len(mem) >= 32:
        b = list(zip(*random.sample(mem, 32)))
        s, a, n, r = (torch.cat(x) for x in b)
        q = policy(s).gather(1, a)
        with torch.no_grad():
            v = target(n).max(1).values
        loss = nn.SmoothL1Loss()(q, (v * 0.99 + r).unsqueeze(1))
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy.parameters(), 100)
        opt.step()
        d = target.state_dict()
        for k, w in policy.state_dict().items():
            d[k] = w * 0.005 + d[k] * 0.995
        target.load_state_dict(d)
