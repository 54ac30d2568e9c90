"""The process group in which several processes train together for one trial, and the model that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from amptune.errors import TargetError
from amptune.measure.results.outcome import Effort, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.runtime.tuned import Tuned
from amptune.workload.copied_model import plain_model
from amptune.workload.user_errors import user_code

__all__ = ["NEXT_BLOCK", "NEXT_STEP", "Leader", "TrialGroup", "classes_put_back", "end_waiting", "joined"]

# Rank 0 tells the others so before it runs a step, and before a block of steps that is timed.
NEXT_STEP, NEXT_BLOCK = b"step", b"block"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialGroup:
    """The group of one trial. Rank 0 tells the other ranks by `tell` what it is about to do; they tell nobody.

    If some parameters `get_none`, gradients are exchanged without waiting for theirs, as training has to ask for.
    """

    get_none: bool
    tell: Callable[[bytes], object] = lambda _: None

    def shared(self, tuned: Tuned, parallel: Callable[[nn.Module, Tuned], Any] | None) -> nn.Module:
        """Returns the model as the ranks share it, by the workload's `parallel` or DistributedDataParallel.

        All ranks call this at the same time, before an optimizer is built. Raises what `parallel` raises, and
        `TargetError` if it returns anything but the model itself or a wrapper of what the policy made of it.
        """
        model = tuned.model
        if parallel is None:
            is_shared = isinstance(model, DistributedDataParallel)
            return model if is_shared else _Parallel(model, find_unused_parameters=self.get_none)
        plain = plain_model(model)
        with user_code("parallel(model, tuned)"):
            found = parallel(plain, tuned)
        if not isinstance(found, nn.Module):
            raise TargetError(
                f"parallel(model, tuned) returned {type(found).__name__}, not a torch.nn.Module: return the model "
                "after fully_shard, or a wrapper such as DistributedDataParallel(tuned.model)"
            )
        if found is plain:
            return model
        if all(inner is not model for inner in found.modules()):
            raise TargetError(
                f"parallel(model, tuned) returned a {type(found).__name__} without tuned.model in it, which is what "
                "this policy trains: wrap tuned.model, not model"
            )
        return found


class _Parallel(DistributedDataParallel):
    """It has what the model has besides `forward`: a loss may read the model's own attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextmanager
def classes_put_back(model: nn.Module) -> Iterator[None]:
    """Gives all modules their classes again at the end: FSDP2 changes them, and a policy is then not undone.

    For a model that is not used again. Its weights stay sharded.
    """
    before = {module: type(module) for module in model.modules()}
    try:
        yield
    finally:
        for module, kind in before.items():
            if type(module) is not kind:  # assigning is refused for TorchScript's, which never change
                module.__class__ = kind


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
