"""A workload whose ranks note their batches and weights after each step, and misbehave as the batch size says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from amptune import Tuned, Workload

WELL, RAISES, OUT_OF_MEMORY, KILLED, HANGS, FIRST_RAISES, QUITS = 4, 5, 6, 7, 8, 9, 10


def misbehave(how: int, rank: int) -> None:
    if how == FIRST_RAISES and rank == 0:
        raise KeyError("the first rank's own mistake")
    if rank == 0:
        return
    match how:
        case 5:
            raise KeyError("the other rank's own mistake")
        case 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        case 7:
            os.kill(os.getpid(), signal.SIGKILL)
        case 8:
            time.sleep(600)
        case 10:
            raise SystemExit("the script ends here")
        case _:
            pass


def step(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    with tuned.autocast():
        loss: torch.Tensor = model(tuned.batch(batch)).square().mean()
    tuned.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has not typed it
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()
    if distributed.is_initialized():
        rank = distributed.get_rank()
        misbehave(len(batch), rank)
        weights = sum(float(parameter.double().sum()) for parameter in model.parameters())
        with Path(os.environ["NOTES"], str(rank)).open("a") as notes:
            notes.write(f"{batch.sum():.9f} {weights:.17f}\n")
    return loss


class WithAnIdlePart(nn.Module):
    """A model with weights that no step uses, as a head for another task."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


def of_its_head(model: nn.Module) -> torch.optim.Optimizer:
    """Trains the head and freezes the rest, as fine-tuning does."""
    model.get_submodule("0").requires_grad_(False)
    return torch.optim.SGD(model.get_submodule("1").parameters(), lr=0.1)


def of(model: Callable[[], nn.Module] = lambda: nn.Linear(3, 2), **parts: Any) -> Workload:
    usual: dict[str, Any] = {
        "batch": lambda n: torch.randn(n, 3),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "batch_size": WELL,
    }
    return Workload(model=model, **usual | parts)


workload = of(loss=None, step=step)
with_an_idle_part = of(WithAnIdlePart)
freezing = of(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), optimizer=of_its_head)


def loader(n: int) -> Iterator[torch.Tensor]:
    """Breaks in the second rank alone, after a few batches."""
    for number in range(100):
        if number == 3 and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise OSError("a shard cannot be read")
        yield torch.randn(n, 3)


breaking_loader = of(loader=loader)
