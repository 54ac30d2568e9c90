"""Ways to CUDA graphs: how long each takes until it is ready, how fast a step is, and whether training is the same.

    python reports/cuda_graphs.py densenet161 amptune
    python reports/cuda_graphs.py densenet161 make_graphed_callables

Trains a bundled workload under bf16 autocast with channels_last and a fused optimizer, one way in each process:
amptune's `cuda_graphs: true`, or PyTorch's own. "Ready" is when the fifth step is done, what is compiled or recorded
included; the step is the median of three stretches of ten, after ten more. The losses are those of the first five.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

from amptune.changes.layout import convert_batch, convert_model
from amptune.changes.tensor_tree import map_tensors
from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.workload.zoo import NAMES, workload

WAYS = ("eager", "amptune", "make_graphed_callables", "cudagraphs", "reduce-overhead")
FIRST_STEPS, STEPS, STRETCHES = 5, 10, 3
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=NAMES, metavar="WORKLOAD", help=f"of {', '.join(NAMES)}")
    parser.add_argument("way", choices=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)}")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("CUDA graphs are a GPU's, and this machine has none")
    print(f"{arguments.workload} {arguments.way}: {measured(arguments.workload, arguments.way)}")


def measured(name: str, way: str) -> str:
    torch.manual_seed(SEED)
    subject = workload(name)
    model = subject.model().cuda()
    convert_model(model, "channels_last")
    optimizer = subject.optimizer(model)
    for group in optimizer.param_groups:
        group["fused"] = True
    batches = [
        convert_batch(map_tensors(torch.Tensor.cuda, subject.batch(subject.batch_size)), "channels_last")
        for _ in range(2)
    ]
    start_s = time.perf_counter()
    called = _called(model, way, batches[0])

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=way != "make_graphed_callables"):
            assert subject.loss is not None  # noqa: S101  # all bundled workloads have one
            loss = subject.loss(called, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def steps(count: int) -> list[torch.Tensor]:
        losses = [step(batches[number % len(batches)]) for number in range(count)]
        torch.cuda.synchronize()
        return losses

    losses = steps(FIRST_STEPS)
    ready_s = time.perf_counter() - start_s
    steps(STEPS)
    took_ms = []
    for _ in range(STRETCHES):
        start_s = time.perf_counter()
        steps(STEPS)
        took_ms.append(1000 * (time.perf_counter() - start_s) / STEPS)
    peak, reserved = (most() / 2**20 for most in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
    median_ms = sorted(took_ms)[STRETCHES // 2]
    times = f"ready after {ready_s:.1f} s, {median_ms:.2f} ms a step ({min(took_ms):.2f} to {max(took_ms):.2f})"
    memory = f"{peak:.0f} MiB allocated, {reserved:.0f} reserved"
    return f"{times}, {memory}, losses {', '.join(f'{loss.item():.6f}' for loss in losses)}"


def _called(model: nn.Module, way: str, batch: Any) -> Any:
    if way == "amptune":
        return apply(Policy(cuda_graphs=True, memory_format="channels_last"), model, guard=False).model
    if way == "cudagraphs":
        return torch.compile(model, backend="cudagraphs")
    if way == "reduce-overhead":
        return torch.compile(model, mode="reduce-overhead")
    if way == "make_graphed_callables":
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            return torch.cuda.make_graphed_callables(model, (torch.randn_like(batch[0]),))
    return model


if __name__ == "__main__":
    main()
