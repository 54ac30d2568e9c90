"""Does a step with DistributedDataParallel, recorded by hand as one CUDA graph, train as the plain loop does?

    torchrun --nproc-per-node 2 reports/ddp_step.py

Follows PyTorch's notes on DDP in graphs: DDP is built, and twelve steps are made, on a side stream. Then forward pass,
backward pass with its exchange, and a fused update are recorded, and replayed on batches that differ by rank. A second
training does the same steps without a recording. Prints whether all weights are equal, bit for bit, on all ranks and in
both trainings, and ms a step of each.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM, STEPS, WIDTH, ROWS = 12, 200, 512, 32


def built(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(rank), device_ids=[rank])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)


def trained(rank: int, *, recorded: bool) -> tuple[torch.Tensor, float]:
    """Returns all weights after training, and ms a step."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has not typed it
    with torch.cuda.stream(stream):
        model, optimizer = built(rank)
        draw = torch.Generator("cuda").manual_seed(rank)
        x, y = torch.empty(ROWS, WIDTH, device="cuda"), torch.empty(ROWS, dtype=torch.int64, device="cuda")

        def fill() -> None:
            x.normal_(generator=draw)
            y.random_(10, generator=draw)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        go: Any = step
        for _ in range(WARM):
            fill()
            step()
        if recorded:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
            go = graph.replay
        torch.cuda.synchronize()
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(STEPS):
            fill()
            go()
        torch.cuda.synchronize()
        ms = 1000 * (time.perf_counter() - began_s) / STEPS
        return torch.cat([one.detach().flatten() for one in model.parameters()]), ms


def main() -> None:
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    plain, plain_ms = trained(rank, recorded=False)
    replayed, replayed_ms = trained(rank, recorded=True)
    all_ranks = [torch.empty_like(replayed) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, replayed)
    if rank == 0:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {len(all_ranks)} ranks, {STEPS} steps")
        print("ranks are equal:", all(torch.equal(all_ranks[0], one) for one in all_ranks))
        print("recorded and plain are equal:", torch.equal(plain, replayed), float((plain - replayed).abs().max()))
        print(f"{plain_ms:.2f} ms a step by itself, {replayed_ms:.2f} ms replayed", flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # NCCL's end waits for the graph's communicator


if __name__ == "__main__":
    main()
