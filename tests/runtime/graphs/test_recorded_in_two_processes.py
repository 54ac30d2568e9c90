from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from taped import TapeRecorder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amptune.policy.findings import Finding
from amptune.runtime.graphs.graphed_model import GraphedModel
from amptune.runtime.graphs.recorder import CudaRecorder

Tensors = dict[str, torch.Tensor]

SIZES = [4, 4, 4, 6, 4, 6, 6, 4]


def net() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def with_unused() -> nn.Module:
    model = net()
    model[-1].unused = nn.Linear(2, 2)
    return model


class _SummedBackward(torch.autograd.Function):
    """As in tensor parallel training: nothing in the forward pass, and a sum over processes in the backward pass."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Summing(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(_SummedBackward.apply(self[0](x)))  # type: ignore[no-untyped-call]


def summing() -> nn.Module:
    return Summing(nn.Conv2d(3, 3, 3, padding=1), *net())


def synchronized() -> nn.Module:
    model: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(net())  # type: ignore[no-untyped-call]
    return model


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train in several processes; `sizes` are of the batches of rank 1, where they are not those of all."""

    make: Callable[[], nn.Module] = net
    autocast: bool = False
    accumulate: int = 1
    sizes: list[int] = field(default_factory=lambda: SIZES)
    options: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


WAYS = {
    "plain": Way(),
    "views of buckets": Way(autocast=True, options={"gradient_as_bucket_view": True}),
    "unused weights": Way(make=with_unused, options={"find_unused_parameters": True}),
    "static graph": Way(options={"static_graph": True}),
    "accumulated": Way(accumulate=2),
    "uneven": Way(sizes=[4, 6, 3, 6, 4, 3, 6, 5]),
    "summed in the backward pass": Way(make=summing, refused="exchanges tensors with other processes"),
}
ON_GPUS = {"synchronized": Way(make=synchronized, refused="exchanges tensors with other processes")}


def _work(rank: int, folder: str, backend: str) -> None:
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        seen = {
            name: {graphs: _trained(way, rank, device, graphs=graphs) for graphs in (False, True)}
            for name, way in (WAYS if backend == "gloo" else WAYS | ON_GPUS).items()
        }
        torch.save(seen, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def _trained(way: Way, rank: int, device: torch.device, *, graphs: bool) -> tuple[list[float], Tensors, int, list[str]]:
    """(losses, weights and buffers, how many passes were recorded, what was said)."""
    torch.manual_seed(0)
    model = way.make().to(device)
    said: list[Finding] = []
    recorder: Any = CudaRecorder if device.type == "cuda" else TapeRecorder
    graphed = GraphedModel(model, said.append, recorder=recorder, device_type=device.type)
    parallel: Any = DistributedDataParallel(graphed if graphs else model, **way.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1 + rank)
    losses = []
    for size in way.sizes if rank else SIZES:
        for part in range(way.accumulate):
            x = torch.randn(size, 3, 8, 8, generator=generator).to(device)
            with nullcontext() if part == way.accumulate - 1 else parallel.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=way.autocast):
                    loss = parallel(x).float().square().mean() / way.accumulate
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return losses, state, len(graphed.recordings), [finding.message for finding in said]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(
    scope="module",
    params=[pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=[pytest.mark.gpu, two_gpus])],
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("two_processes")
    mp.spawn(_work, args=(str(folder), request.param), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", [*WAYS, *ON_GPUS])
def test_training_is_that_of_the_plain_model_with_the_same_weights_in_both_processes(
    seen: list[dict[str, Any]], name: str
) -> None:
    if name not in seen[0]:
        pytest.skip("needs GPUs")
    way = (WAYS | ON_GPUS)[name]
    for rank, of_rank in enumerate(seen):
        (losses, state, _, _), (graphed_losses, graphed_state, recorded, said) = of_rank[name].values()
        torch.testing.assert_close((graphed_losses, graphed_state), (losses, state), rtol=1e-2, atol=1e-3)
        assert [way.refused in message for message in said] == ([True] if way.refused else [])
        sizes = way.sizes if rank else SIZES
        assert recorded == (0 if way.refused else sum(sizes.count(size) > 1 for size in set(sizes)))
    one, other = (of_rank[name][True][1] for of_rank in seen)
    weights = [key for key in one if not key.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    assert all(torch.equal(one[key], other[key]) for key in weights)
