"""Workloads for worker processes: one misbehaves as its batch size says, others say how ranks share the model.

Ranks note what they train in files of the folder NOTES.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from amptune import Tuned, Workload
from amptune.runtime.integrations.fsdp import fully_shard

WELL, RAISES, EXITS, KILLED, HANGS, NAN, OUT_OF_MEMORY, UNSUPPORTED, POISONS, QUITS, FIRST_RAISES = range(4, 15)

torch.set_num_threads(int(os.environ.get("THREADS", torch.get_num_threads())))
DATA = torch.randn(8, 3, 6, 6)


class Net(nn.Module):
    """With a convolution of 5 channels, so that two ranks have parts of different sizes."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 5, 3), norm or nn.Identity()
        self.block, self.last = nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.block(self.norm(self.first(x).mean(dim=(2, 3)))))


class WithAnIdlePart(Net):
    """A model with weights that no step uses, as a head for another task."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


def rank() -> int | None:
    return distributed.get_rank() if distributed.is_initialized() else None


def note(words: str) -> None:
    with Path(os.environ["NOTES"], str(rank())).open("a") as notes:
        notes.write(words + "\n")


ERRORS = {
    RAISES: KeyError("the user's own mistake"),
    OUT_OF_MEMORY: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    UNSUPPORTED: NotImplementedError("\"some_op\" not implemented for 'Half'"),
    QUITS: SystemExit("the script ends here"),
}
ACTS: dict[int, Callable[[], object]] = {
    EXITS: lambda: os._exit(3),
    KILLED: lambda: os.kill(os.getpid(), signal.SIGKILL),
    HANGS: lambda: time.sleep(600),
}


def misbehave(how: int, model: nn.Module) -> None:
    """Of several ranks only the second does, but for one way."""
    if rank() == 0:
        if how == FIRST_RAISES:
            raise KeyError("the first rank's own mistake")
        return
    if how in ERRORS:
        raise ERRORS[how]
    ACTS.get(how, lambda: None)()
    if how == POISONS:
        dict(model.named_buffers())["norm.running_mean"].fill_(float("inf"))


def step(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Any:
    print(f"the user prints in every step\nthreads: {torch.get_num_threads()}", flush=True)
    misbehave(len(batch), model)
    with tuned.autocast():
        found = loss(model, tuned.batch(batch)) * (float("nan") if len(batch) == NAN else 1.0)
    tuned.scaler.scale(found).backward()
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()
    if rank() is not None:
        weights = sum(float(parameter.double().sum()) for parameter in model.parameters())
        note(f"{batch.sum():.9f} {weights:.17f}")
    return found


def loss(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def of(model: Any = Net, **parts: Any) -> Workload:
    usual: dict[str, Any] = {
        "batch": lambda n: torch.randn(n, 3, 6, 6),
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "batch_size": WELL,
    }
    return Workload(model=model, **usual | parts)


def of_its_last(model: nn.Module) -> torch.optim.Optimizer:
    """Trains the last layer and freezes the rest, as fine-tuning does."""
    model.requires_grad_(False)
    return torch.optim.SGD(model.get_submodule("last").requires_grad_(True).parameters(), lr=0.1)


def loader(n: int) -> Iterator[torch.Tensor]:
    """Breaks in the second rank alone, after a few batches."""
    for number in range(100):
        if number == 3 and rank() == 1:
            raise OSError("a shard cannot be read")
        yield torch.randn(n, 3, 6, 6)


def built_once() -> nn.Module:
    built = Path(os.environ["NOTES"], "built")
    if built.exists():
        raise RuntimeError("the second build fails")
    built.touch()
    return Net()


workload = of(lambda: Net(nn.BatchNorm1d(5)), loss=None, step=step)
replicated = of(loss=None, step=step)
with_an_idle_part = of(WithAnIdlePart)
freezing = of(optimizer=of_its_last)
breaking_loader = of(loader=loader)
drawn_at_import = of(batch=lambda n: DATA[:n].clone())
once = of(built_once)
no_parameters = of(nn.ReLU)
no_module = of(lambda: 3)
not_built = of(lambda: 1 / 0)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))  # where GPUs are visible, the default is of them


def sharded(model: nn.Module, tuned: Tuned) -> nn.Module:
    total = sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters())
    note(f"{type(model).__name__} {total:.15f}")
    fully_shard(model.get_submodule("block"), tuned, mesh=mesh())
    return fully_shard(model, tuned, mesh=mesh())


def noting_loss(model: nn.Module, batch: torch.Tensor) -> Any:
    if rank() is not None:
        kinds = {type(one.data).__name__ for one in model.parameters()}
        note(f"{type(model).__name__} of {', '.join(sorted(kinds))}")
    return loss(model, batch)


def sharded_to_the_idle_part(model: nn.Module, tuned: Tuned) -> nn.Module:
    fully_shard(model.get_submodule("idle"), tuned, mesh=mesh())
    return fully_shard(model, tuned, mesh=mesh())


def breaking_loss(model: nn.Module, batch: torch.Tensor) -> Any:
    if rank() == 1:
        weight: Any = model.get_parameter("idle.weight")
        with torch.no_grad():
            weight.to_local().fill_(float("nan"))
    return loss(model, batch)


by_fsdp2 = of(parallel=sharded, loss=noting_loss)
clipped = of(parallel=sharded, clip=0.1, accumulate=2)
plain = of()
wraps_another = of(parallel=lambda model, _: DistributedDataParallel(model))
returns_nothing = of(parallel=lambda *_: None)
breaks_in_rank_1 = of(WithAnIdlePart, parallel=sharded_to_the_idle_part, loss=breaking_loss)
