"""Compiled blocks, recorded too, train as the model does, in the loops that people write."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amptune import Policy, apply
from amptune.runtime.tuned import Tuned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WIDTH, DEPTH, STEPS = 64, 4, 12


class Block(nn.Module):
    """Attention and a perceptron, which returns a pair, and may leave out its work."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.calls.add_(1)
        normed = self.norm(x)
        x = x + self.attend(normed, normed, normed, need_weights=False)[0]
        x = x + self.mix(x)
        return x, x.mean((1, 2))


class Model(nn.Module):
    """Equal blocks with skips around pairs of them; `kept` are means that outlive the step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, WIDTH), nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 4)
        self.drop = self.checkpoints = False
        self.random = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        skip, means = x, torch.zeros(len(x), device=x.device)
        for place, block in enumerate(self.blocks):
            if self.drop and self.training and self.random.random() < 0.5:
                continue
            if self.checkpoints:
                x, mean = checkpoint(block, x, use_reentrant=False)
            else:
                x, mean = block(x)
            means = means + mean
            if place % 2:
                x, skip = x + skip, x
        out: torch.Tensor = self.head(x.mean(1)) + means[:, None]
        return out


Loop = Callable[[Tuned, torch.optim.Optimizer], Iterator[torch.Tensor]]


def batch(step: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 5, 8, generator=generator)
    return x.cuda(), torch.randint(0, 4, (size,), generator=generator).cuda()


def loss_of(tuned: Tuned, step: int, size: int = 6) -> torch.Tensor:
    x, y = batch(step, size)
    with tuned.autocast():
        return nn.functional.cross_entropy(tuned.model(x), y)


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it


def accumulating(tuned: Tuned, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Gradients of three batches, clipped, kept in place."""
    for step in range(STEPS):
        loss = loss_of(tuned, step)
        backward(loss / 3)
        if step % 3 == 2:
            nn.utils.clip_grad_norm_(tuned.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step < 6)
        yield loss


def in_changing_batches(tuned: Tuned, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """And an evaluation now and then; at some steps a backward pass goes through two forward passes."""
    for step in range(STEPS):
        loss = loss_of(tuned, step, size=6 if step % 4 else 3)
        loss = loss if step % 3 else loss + loss_of(tuned, step + 50)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            tuned.model.eval()
            with torch.no_grad():
                yield loss_of(tuned, 100 + step)
            tuned.model.train()
        yield loss


def trained(model: Model, policy: Policy, loop: Loop) -> tuple[list[float], dict[str, torch.Tensor]]:
    model.random = random.Random(0)
    with apply(policy, model) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        losses = [loss.item() for loss in loop(tuned, optimizer)]
        return losses, {name: one.detach().clone() for name, one in model.state_dict().items()}


@pytest.mark.parametrize("loop", [accumulating, in_changing_batches])
@pytest.mark.parametrize("kind", ["plain", "drop", "checkpoints"])
@pytest.mark.filterwarnings("ignore::amptune.runtime.apply_policy.PolicyDriftWarning")
def test_blocks_train_as_the_model_does(kind: str, loop: Loop) -> None:
    torch.manual_seed(0)
    model = Model().cuda()
    if kind != "plain":
        setattr(model, kind, True)
    twin = deepcopy(model)
    losses, state = trained(model, Policy(compile="blocks", cuda_graphs=True), loop)
    expected, plain = trained(twin, Policy(), loop)
    torch.compiler.reset()
    assert losses == pytest.approx(expected, rel=2e-3)
    for name, value in state.items():
        torch.testing.assert_close(value, plain[name], rtol=0.02, atol=2e-3)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_a_recording_repeats_the_compiled_kernels() -> None:
    """A compiler gives up what it meets under a dispatch mode, as that of a rehearsal; the kernels were eager then."""
    torch.manual_seed(0)
    model = Model().cuda()
    with apply(Policy(compile="blocks", cuda_graphs=True), model) as tuned:
        for step in range(6):
            backward(loss_of(tuned, step))
        recordings: Any = tuned.model.recordings
        assert len(recordings) == 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            backward(loss_of(tuned, 6))
            torch.cuda.synchronize()
    torch.compiler.reset()
    assert any(event.name.startswith("triton_") for event in profile.events())
