"""A workload that misbehaves on demand: the batch size says how."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn

from amptune import Tuned, Workload

WELL, RAISES, EXITS, KILLED, HANGS, NAN, OUT_OF_MEMORY, UNSUPPORTED, POISONS = 4, 5, 6, 7, 8, 9, 10, 11, 12


class Normed(nn.Module):
    """A linear layer behind a batch normalisation, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.norm(x))
        return result


def misbehave(how: int, model: nn.Module) -> None:
    match how:
        case 5:
            raise KeyError("the user's own mistake")
        case 6:
            os._exit(3)
        case 7:
            os.kill(os.getpid(), signal.SIGKILL)
        case 8:
            time.sleep(600)
        case 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        case 11:
            raise NotImplementedError("\"some_op\" not implemented for 'Half'")
        case 12:
            dict(model.named_buffers())["norm.running_mean"].fill_(float("inf"))
        case _:
            pass


def step(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    print("the user prints in every step", flush=True)
    misbehave(len(batch), model)
    with tuned.autocast():
        loss: torch.Tensor = model(tuned.batch(batch)).square().mean()
    if len(batch) == NAN:
        loss = loss * float("nan")
    tuned.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has not typed it
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()
    return loss


def workload() -> Workload:
    return Workload(
        model=Normed,
        batch=lambda n: torch.randn(n, 3),
        step=step,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batch_size=WELL,
    )
