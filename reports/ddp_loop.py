"""Trains a workload by a plain loop under DistributedDataParallel, and prints the time of a step: no part of the tuner.

    torchrun --standalone --nproc-per-node 2 reports/ddp_loop.py amptune.workload.zoo:resnet50 --policy stock
    torchrun --standalone --nproc-per-node 2 reports/ddp_loop.py amptune.workload.zoo:resnet50 --policy resnet50.yaml

The policy is applied by `amptune.apply`; the batches come from the workload's loader. Rank 0 prints a line of JSON:
milliseconds per optimizer step, by wall clock, of `--blocks` blocks in a row. Such a figure is held against
`evidence.step_ms` of the policy file, and against that of its baseline.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import amptune
from amptune.changes.tensor_tree import moved_to
from amptune.workload.targets import load_workload, parse_target
from amptune.workload.workload import Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a workload with a loss, as `amptune tune` takes it")
    parser.add_argument("--policy", default="stock", help="stock, or a policy file")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a block of steps")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    workload = load_workload(parse_target(given.target))
    policy = amptune.Policy() if given.policy == "stock" else given.policy
    torch.manual_seed(0)
    step_ms = trained_ms(workload, policy, device, given.warmup, given.seconds, given.blocks)
    if dist.get_rank() == 0:
        ranks = {"target": given.target, "policy": given.policy, "devices": dist.get_world_size()}
        print(json.dumps({**ranks, "step_ms": round(statistics.fmean(step_ms), 3), "blocks_ms": step_ms}), flush=True)
    dist.destroy_process_group()


def trained_ms(
    workload: Workload, policy: Any, device: torch.device, warmup_s: float, block_s: float, blocks: int
) -> list[float]:
    """Returns the milliseconds of an optimizer step in each block."""
    model = workload.model().to(device)
    with amptune.apply(policy, model) as tuned:
        optimizer = tuned.optimizer(workload.optimizer(model))
        if workload.loss is None:
            raise SystemExit(f"{workload.name} has a step of its own; this program trains by a loss")
        parallel = DistributedDataParallel(tuned.model)
        train = tuned.training_step(workload.loss, optimizer, workload.clip, model=parallel)
        torch.manual_seed(1 + dist.get_rank())
        fed = batches(workload, tuned.policy.batch_size or workload.batch_size, device)

        def step() -> None:
            for _ in range(tuned.accumulate):
                train(next(fed))

        timed(step, 3, device)  # what compiles does so here
        pace_ms = timed(step, 3, device)
        pace_ms = timed(step, agreed(1000 * warmup_s / pace_ms), device)
        count = agreed(1000 * block_s / pace_ms)
        return [round(timed(step, count, device), 3) for _ in range(blocks)]


def batches(workload: Workload, size: int, device: torch.device) -> Iterator[Any]:
    """Yields batches on the device, epoch after epoch, or the same few if the workload has no loader."""
    loader = [workload.batch(size) for _ in range(8)] if workload.loader is None else workload.loader(size)
    while True:
        for batch in loader:
            yield moved_to(device, batch, partial(torch.Tensor.to, device=device, non_blocking=True))


def timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Returns the milliseconds of a step, all ranks together, of so many in a row."""
    settle(device)
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    settle(device)
    return 1000 * (time.perf_counter() - began_s) / count


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def agreed(count: float) -> int:
    """Returns rank 0's count, at least 1: all ranks run as many steps."""
    found = [max(1, round(count))]
    dist.broadcast_object_list(found)
    return found[0]


if __name__ == "__main__":
    main()
