"""Recorded CUDA graphs that are compared with the model at every 16th step: false alarms, and what comparing costs.

    python reports/graph_checks.py --out reports/NAME/checks.jsonl --steps 2000 resnet18 bert_base

Trains bundled workloads under bf16 autocast (fp16 with `--fp16`) with `cuda_graphs: true`, each in a process of its
own, and appends a line as each is done: the comparisons that were made, the findings (there should be none), the ms of
a step that is replayed and of one that is compared, and from these the share of a long training that comparing takes
at the usual distances, and of the first 512 steps. What stands in the file is not done again. `--seconds` ends a
training early. With several GPUs, `--lanes` trains as many at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from amptune.changes.layout import convert_batch
from amptune.changes.tensor_tree import map_tensors
from amptune.policy.settings import MemoryFormat, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.graphs import check
from amptune.runtime.graphs.graphed_model import GraphedModel
from amptune.workload.zoo import NAMES, workload

EVERY, TIMED, BATCHES = 16, 60, 8
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=NAMES, metavar="WORKLOAD", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=Path("checks.jsonl"), metavar="FILE")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=120.0, help="for a workload (default 120)")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("CUDA graphs are a GPU's, and this machine has none")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        for name in arguments.workloads:
            row = trained(name, arguments.steps, arguments.seconds, "fp16" if arguments.fp16 else "bf16")
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        return
    known = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    missing = [name for name in arguments.workloads if name not in {row["workload"] for row in known}]
    lanes: Queue[int] = Queue()
    for lane in range(arguments.lanes):
        lanes.put(lane)

    def run(name: str) -> None:
        lane = lanes.get()
        command = [sys.executable, __file__, *sys.argv[1:], "--here"]
        command = [part for part in command if part not in NAMES] + [name]
        subprocess.run(command, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": str(lane)})  # noqa: S603
        lanes.put(lane)

    with ThreadPoolExecutor(arguments.lanes) as pool:
        list(pool.map(run, missing))


def trained(name: str, steps: int, seconds: float, autocast: str) -> dict[str, Any]:
    """Returns the row of one workload."""
    check.CHECK_EVERY, check.LAST_DOUBLED = EVERY, 0
    torch.manual_seed(SEED)
    subject = workload(name)
    model = subject.model().cuda()
    layout: MemoryFormat = "channels_last" if any(one.dim() == 4 for one in model.parameters()) else "contiguous"
    policy = Policy(autocast=autocast, memory_format=layout, cuda_graphs=True, fused_optimizer=True)  # type: ignore[arg-type]
    with apply(policy, model, guard=False) as tuned:
        assert isinstance(tuned.model, GraphedModel)  # noqa: S101  # the policy has CUDA graphs
        recordings = tuned.model.recordings
        optimizer = tuned.optimizer(subject.optimizer(model))
        batches = [
            convert_batch(map_tensors(torch.Tensor.cuda, subject.batch(subject.batch_size)), layout)
            for _ in range(BATCHES)
        ]
        taken = 0

        def step() -> None:
            nonlocal taken
            taken += 1
            optimizer.zero_grad()
            with tuned.autocast():
                assert subject.loss is not None  # noqa: S101  # all bundled workloads have one
                loss = subject.loss(tuned.model, batches[taken % BATCHES])
            loss = tuned.scaler.scale(loss)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
            tuned.scaler.step(optimizer)
            tuned.scaler.update()

        def timed() -> float:
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            step()
            torch.cuda.synchronize()
            return 1000 * (time.perf_counter() - start_s)

        start_s = time.perf_counter()
        step()
        recorded_s = timed() / 1000
        recordings.checks = False
        replayed = [timed() for _ in range(TIMED)][5:]
        compared = []
        for _ in range(TIMED // 10):
            recordings.check_next()
            compared.append(timed())
        recordings.checks = True
        while taken < steps and time.perf_counter() - start_s < seconds:
            step()
        torch.cuda.synchronize()
        step_ms, check_ms = statistics.median(replayed), statistics.median(compared)
        extra = max(0.0, check_ms - step_ms) / step_ms
        return {
            "workload": name,
            "policy": str(policy),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "steps": taken,
            "compared": len(compared) + (taken - TIMED) // EVERY,
            "findings": [str(finding) for finding in tuned.findings],
            "recorded": len(recordings),
            "recording_s": recorded_s,
            "step_ms": step_ms,
            "compared_ms": check_ms,
            "share_in_the_long_run": extra / 512,
            "share_of_the_first_512_steps": 10 * extra / 512,
            "largest_mib": torch.cuda.max_memory_allocated() / 2**20,
        }


if __name__ == "__main__":
    main()
