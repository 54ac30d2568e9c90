"""The process group in which several processes train together for one trial, as DistributedDataParallel needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from amptune.measure.results.outcome import Effort, Measurement, Outcome
from amptune.policy.settings import Policy

__all__ = ["NEXT_BLOCK", "NEXT_STEP", "Leader", "TrialGroup", "end_waiting", "joined"]

# Rank 0 tells the others so before it runs a step, and before a block of steps that is timed.
NEXT_STEP, NEXT_BLOCK = b"step", b"block"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialGroup:
    """The group of one trial. Rank 0 tells the other ranks by `tell` what it is about to do; they tell nobody.

    If some parameters `get_none`, gradients are exchanged without waiting for theirs, as training has to ask for.
    """

    get_none: bool
    tell: Callable[[bytes], object] = lambda _: None

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Returns the model with its gradients averaged over the ranks; all ranks call this at the same time."""
        if isinstance(model, DistributedDataParallel):
            return model
        return _Parallel(model, find_unused_parameters=self.get_none)


class _Parallel(DistributedDataParallel):
    """It has what the model has besides `forward`: a loss may read the model's own attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Leader(Protocol):
    """Rank 0's hold on the other ranks."""

    def lead(
        self, policy: Policy, effort: Effort, trial: Callable[[TrialGroup], Measurement], *, get_none: bool
    ) -> Outcome:
        """Runs a trial here and the same steps on all other ranks; returns the outcome of all of them.

        `get_none` tells if some parameters get no gradients.
        """
        ...


@contextmanager
def joined(rank: int, size: int, store: Any) -> Iterator[None]:
    """Makes this process one of the group's ranks, which meet at torch's `store`, on its CUDA device if it has one.

    After an error nothing is waited for.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has not typed it
        backend, device = "nccl", torch.device("cuda", torch.cuda.current_device())
    else:
        backend, device = "gloo", None
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device)
    try:
        yield
    except BaseException:
        end_waiting()
        raise
    finally:
        if distributed.is_initialized():  # else another thread has ended it
            distributed.destroy_process_group()


def end_waiting() -> None:
    """Ends the communication of GPUs, from any thread: who waits for a rank that failed goes on.

    Gloo needs no such call: a rank that leaves closes its connections.
    """
    with suppress(AssertionError, RuntimeError, ValueError):  # it has ended already
        if distributed.is_initialized() and distributed.get_backend() == "nccl":
            distributed.distributed_c10d._abort_process_group()  # no public name leads to it
