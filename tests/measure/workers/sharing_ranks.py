"""Workloads that say by themselves how the ranks share the model. The ranks note what they train, and from where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from amptune import Tuned, Workload
from amptune.runtime.integrations.fsdp import fully_shard

SIZE = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)  # of 5, so that two ranks have parts of different sizes
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(2))
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).mean(dim=(2, 3))
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x)
        return result


def note(words: str) -> None:
    with Path(os.environ["NOTES"], str(distributed.get_rank())).open("a") as notes:
        notes.write(words + "\n")


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))  # where GPUs are visible, the default is of them


def sharded(model: nn.Module, tuned: Tuned) -> nn.Module:
    assert isinstance(model, Net)
    total = sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters())
    note(f"{type(model).__name__} {total:.15f}")
    for block in model.blocks:
        fully_shard(block, tuned, mesh=mesh())
    return fully_shard(model, tuned, mesh=mesh())


def sharded_by_pytorch(model: nn.Module, tuned: Tuned) -> nn.Module:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(tuned.policy.autocast)
    shard: Any = fsdp.fully_shard
    return shard(model, mesh=mesh(), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=dtype))  # type: ignore[no-any-return]


def with_options(_: nn.Module, tuned: Tuned) -> nn.Module:
    return DistributedDataParallel(tuned.model, gradient_as_bucket_view=True, static_graph=True)


def mistaken(*_: object) -> nn.Module:
    raise KeyError("no such mesh")


def forgetful(model: nn.Module, tuned: Tuned) -> None:
    sharded_by_pytorch(model, tuned)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


def noting_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if distributed.is_initialized():
        kinds = {type(one.data).__name__ for one in model.parameters()}
        note(f"{type(model).__name__} of {', '.join(sorted(kinds))}")
    return loss(model, batch)


def of(parallel: Any, **parts: Any) -> Workload:
    usual = {
        "model": Net,
        "batch": lambda n: torch.randn(n, 3, 6, 6),
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "batch_size": SIZE,
        "parallel": parallel,
    }
    return Workload(**usual | parts)


by_fsdp2 = of(sharded, loss=noting_loss)
clipped = of(sharded, clip=0.1, accumulate=2)
by_pytorch = of(sharded_by_pytorch)
by_ddp = of(with_options, loss=noting_loss)
plain = of(None)
raises = of(mistaken)
returns_nothing = of(forgetful)


class WithAnIdlePart(Net):
    """A model with weights that no step uses: they break nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


def sharded_to_the_idle_part(model: nn.Module, tuned: Tuned) -> nn.Module:
    fully_shard(model.get_submodule("idle"), tuned, mesh=mesh())
    return fully_shard(model, tuned, mesh=mesh())


def breaking_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if distributed.is_initialized() and distributed.get_rank() == 1:
        weight: Any = model.get_parameter("idle.weight")
        with torch.no_grad():
            weight.to_local().fill_(float("nan"))
    return loss(model, batch)


breaks_in_rank_1 = of(sharded_to_the_idle_part, model=WithAnIdlePart, loss=breaking_loss)
