"""Training with and without recorded passes, on a CPU, for tests that compare the two."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from taped import TapeRecorder
from torch import nn

from amptune.policy.findings import Finding
from amptune.runtime.graphs.graphed_model import GraphedModel

Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], Any]


class Net(nn.Module):
    """Counts how often its own forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        forwards.write(f"{tuple(x.shape)}\n")
        return self.head(self.body(x).flatten(1))


class Forwards(io.StringIO):
    """The shapes of inputs, written down as to a file: what a forward pass appends to a list is an effect."""

    def shapes(self) -> list[str]:
        return self.getvalue().splitlines()

    def clear(self) -> None:
        self.truncate(0)
        self.seek(0)


forwards = Forwards()
said: list[Finding] = []


def built(make: Callable[[], nn.Module] = Net) -> Any:
    """The model, with nothing written down of others before it."""
    forwards.clear()
    said.clear()
    torch.manual_seed(0)
    return make()


def graphed(model: nn.Module) -> GraphedModel:
    return GraphedModel(model, said.append, recorder=TapeRecorder, device_type="cpu")


def batch(seed: int, size: int = 4) -> torch.Tensor:
    return torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def stepping(
    *,
    in_bf16: bool = False,
    caches: bool = True,
    parts: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda x: [x],
) -> Step:
    """A step of a training; the loss is of the first output."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        for part in parts(x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bf16, cache_enabled=caches):
                out = model(part)
                loss = (out[0] if isinstance(out, tuple) else out).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


plain_step, in_bf16 = stepping(), stepping(in_bf16=True)
accumulated = stepping(parts=lambda x: (x, x.flip(0) + 1))


def trained(model: nn.Module, called: nn.Module, step: Step, sizes: list[int]) -> tuple[list[float], dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [float(step(called, optimizer, batch(seed, size))) for seed, size in enumerate(sizes)]
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def require_same_training(
    make: Callable[[], nn.Module] = Net, step: Step = plain_step, sizes: Sequence[int] = (4,) * 6
) -> Any:
    """Trains with and without recording, to the same losses, weights and buffers; gives what was recorded."""
    plain = built(make)
    expected, weights = trained(plain, plain, step, [*sizes])
    model = built(make)
    called = graphed(model)
    losses, state = trained(model, called, step, [*sizes])
    assert losses == expected
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    return called
