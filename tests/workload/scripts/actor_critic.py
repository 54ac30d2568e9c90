"""An actor-critic as people write it: fifteen forward passes a step, by methods, in an environment of its own."""

import argparse

import torch
from torch import nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--episodes", type=int, default=100_000)
args = parser.parse_args()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Walk:
    def reset(self):
        self.state = torch.zeros(4)
        return self.state

    def step(self, action):
        self.state = 0.9 * self.state + 0.1 * torch.randn(4) + 0.1 * action
        return self.state, float(self.state.sum())


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, args.width), nn.Tanh(), nn.Linear(args.width, args.width), nn.Tanh())
        self.action, self.value = nn.Linear(args.width, 2), nn.Linear(args.width, 1)

    def act(self, state):
        hidden = self.body(state)
        return Categorical(logits=self.action(hidden)), self.value(hidden)


policy, env = Policy().to(device), Walk()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for episode in range(args.episodes):
    state, logs, values, rewards = env.reset(), [], [], []
    for _ in range(15):
        chosen, value = policy.act(state.to(device))
        action = chosen.sample()
        state, reward = env.step(action.item())
        logs.append(chosen.log_prob(action))
        values.append(value.squeeze())
        rewards.append(reward)
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    targets, values = torch.tensor(returns, device=device), torch.stack(values)
    gain = targets - values
    loss = -(torch.stack(logs) * gain.detach()).mean() + gain.square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    if episode % 100 == 0:
        print(f"episode {episode} reward {sum(rewards):.2f}")
