"""A workload of any model, and one measurement of it on a bench."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amptune import Policy, Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import STOCK
from amptune.runtime.tuned import Tuned

QUICK = Effort(warmup_s=0.05, measure_s=0.01, min_steps=2)
CPU = torch.device("cpu")
Step = Callable[[Tuned, nn.Module, torch.optim.Optimizer, torch.Tensor], torch.Tensor]


def workload_of(model: nn.Module | Callable[[], nn.Module], shape: tuple[int, ...] = (8,), **more: object) -> Workload:
    parts: dict[str, object] = {
        "model": (lambda: model) if isinstance(model, nn.Module) else model,
        "batch": lambda n: torch.randn(n, *shape),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "batch_size": 4,
    }
    return Workload(**{**parts, **more})  # type: ignore[arg-type]  # parts by name


def require_lstm_in_bf16(device: torch.device = CPU) -> None:
    """Skips the test where a CPU has no LSTM in bf16, as one without AVX-512 has none."""
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            nn.LSTM(2, 2, device=device)(torch.ones(1, 1, 2, device=device))
    except RuntimeError as error:
        pytest.skip(str(error))


def step_of(words: str, loss: Callable[..., Any] = lambda model, batch: model(batch).float().square().mean()) -> Step:
    """A step of the user's own by what it does in turn: `first` and `second` are backward passes of half a batch."""

    def step(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        half, found = len(batch) // 2, torch.zeros(())
        parts = {"backward": batch, "unscaled-backward": batch, "first": batch[:half], "second": batch[half:]}

        def own_gradients() -> None:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01)

        acts: dict[str, Callable[[], object]] = {
            "unscale": lambda: tuned.scaler.unscale_(optimizer),
            "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
            "scaler-step": lambda: tuned.scaler.step(optimizer),
            "step": optimizer.step,
            "update": tuned.scaler.update,
            "zero": optimizer.zero_grad,
            "own-gradients": own_gradients,
        }
        for word in words.split():
            if word in acts:
                acts[word]()
                continue
            with tuned.autocast():
                found = loss(model, parts[word])
            torch.autograd.backward(found if word == "unscaled-backward" else tuned.scaler.scale(found))
        return found

    return step


def measured(bench: Bench, policy: Policy = STOCK) -> Measurement:
    outcome = bench.measure(policy, QUICK)
    assert isinstance(outcome, Measurement), outcome
    return outcome


class Called(nn.Module):
    """A module that is a function of itself and its input."""

    def __init__(self, call: Callable[..., torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.call = call
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


class Checkpointed(nn.Sequential):
    """Runs each of its modules again in the backward pass."""

    def __init__(self, *modules: nn.Module, reentrant: bool = False) -> None:
        super().__init__(*modules)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_() if x.is_leaf else x
        for module in self:
            x = checkpoint(module, x, use_reentrant=self.reentrant)
        return x


class Remembering(nn.Linear):
    """Keeps state in plain attributes, as target networks that are copied at times and replay buffers do."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0
        self.hidden: torch.Tensor | None = None
        self.replay: deque[torch.Tensor | None] = deque([None], maxlen=4)
        self.best, self.mean = {"loss": 9.0}, torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * (1 + len(self.replay))
        self.calls += 1
        self.hidden = hidden = y.detach()
        self.replay.append(hidden)
        self.best["loss"] = self.best[str(self.calls)] = 1.0
        self.mean += hidden.mean(0)
        return y


class Growing(nn.Linear):
    """Makes a buffer, replaces one by a longer one at each step, and resizes one in place, as observers do."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("largest", torch.zeros(0))
        self.register_buffer("mask", torch.ones(1).expand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(3))
        self.seen = torch.zeros(len(self.seen) + 1)
        self.get_buffer("largest").resize_(3).fill_(1.0)
        return super().forward(x) * self.get_buffer("mask") * (1 + len(self.seen))
