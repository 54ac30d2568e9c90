"""The seconds from a command's start to its first step: of a plain script, and of `amptune tune`, for each target.

    python reports/first_step.py --repeats 3 amptune.workload.zoo:digits examples/tune_a_trainer.py:workload

A plain script imports what the target imports, builds model, optimizer and one batch on the device, and trains one
step. Of `amptune tune` two moments are told: the workload is built (its loader was looked at, and one step inspected),
and the first trial is over. Both run in turn, and the median of the repeats is printed: of one, the second run finds
files in memory that the first one read from disk.
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Lines of the progress on stderr: what is in them, and the name of the moment that they tell.
MOMENTS = (("building the workload", "started"), (" parameters, batch ", "built"), (" ms ", "measured"))


def train_one_step(target: str, device: str) -> None:
    """Trains one step of a target's workload, as a plain script does."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).parent))
        found: Any = runpy.run_path(place, run_name="workload")[name]
    else:
        found = getattr(importlib.import_module(place), name)
    workload = found if hasattr(found, "batch_size") else found()
    import torch

    from amptune.changes.tensor_tree import moved_to

    on = torch.device(device)
    model = workload.model().to(on)
    optimizer = workload.optimizer(model)
    batch = moved_to(on, workload.batch(workload.batch_size), lambda tensor: tensor.to(on))
    workload.loss(model, batch).backward()
    optimizer.step()
    if on.type == "cuda":
        torch.cuda.synchronize()
    print("trained", flush=True)


def plain_s(target: str, device: str) -> float:
    """Returns the seconds from the start of a plain script to the end of its first step."""
    began_s = time.monotonic()
    command = [sys.executable, __file__, "--plain", "--device", device, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        if not any("trained" in line for line in script.stdout):
            raise SystemExit(f"{target}: the plain script failed")
        return time.monotonic() - began_s


def tuned_s(target: str, device: str, budget: str) -> dict[str, float]:
    """Returns the seconds from the start of `amptune tune` to each of the `MOMENTS`."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        own = [
            "--budget",
            budget,
            "--trials",
            "1",
            "--study",
            folder,
            "-o",
            f"{folder}/policy.yaml",
            "--device",
            device,
        ]
        command = [sys.executable, "-m", "amptune", "tune", target, *own]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as tuning:
            assert tuning.stderr is not None
            for line in tuning.stderr:
                for words, moment in MOMENTS:
                    if words in line:
                        found.setdefault(moment, time.monotonic() - began_s)
                if "measured" in found:
                    tuning.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", default="120s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="train one step of the target, and nothing else")
    given = parser.parse_args()
    if given.plain:
        train_one_step(given.targets[0], given.device)
        return
    for target in given.targets:
        plain: list[float] = []
        tuned: list[dict[str, float]] = []
        for _ in range(given.repeats):
            plain.append(plain_s(target, given.device))
            tuned.append(tuned_s(target, given.device, given.budget))
        row = {
            name: statistics.median(one[name] for one in tuned)
            for _, name in MOMENTS
            if all(name in one for one in tuned)
        }
        first_s = statistics.median(plain)
        seconds = {name: round(value, 2) for name, value in {"plain": first_s, **row}.items()}
        print(json.dumps({"target": target, **seconds, "ratio": round(row["built"] / first_s, 2)}), flush=True)


if __name__ == "__main__":
    main()
