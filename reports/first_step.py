"""The seconds from a command's start to its first step: of a plain script, and of `amptune tune`, for each target.

    python reports/first_step.py amptune.workload.zoo:digits examples/tune_a_trainer.py:workload

A plain script imports what the target imports, builds model, optimizer and one batch on the device, and trains one
step. Of `amptune tune` three moments are told: its first line; the workload is built, of which one step has trained;
the first trial is over. `ratio` is that of the second to the plain script. Both run in turn, and medians are printed;
the very first run of all reads the libraries' files from disk, and is left out.
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

# What is in the lines of the progress on stderr that tell the moments.
MOMENTS = {"started": "building the workload", "built": " parameters, batch ", "measured": " ms "}


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

    model = workload.model().to(device)
    optimizer = workload.optimizer(model)
    drawn = workload.batch(workload.batch_size)
    batch = moved_to(torch.device(device), drawn, lambda tensor: tensor.to(device))
    loss = workload.loss(model, batch)
    loss.backward()
    optimizer.step()
    print("trained", float(loss), sum(float(parameter.sum()) for parameter in model.parameters()), flush=True)


def moments_of(command: list[str], words: dict[str, str]) -> dict[str, float]:
    """Returns the seconds from the start of a command to the first line with each of the words; then ends it."""
    found: dict[str, float] = {}
    began_s = time.monotonic()
    with subprocess.Popen(  # noqa: S603  # this program, and amptune
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            for moment, told_by in words.items():
                if told_by in line:
                    found.setdefault(moment, time.monotonic() - began_s)
            if len(found) == len(words):
                process.terminate()
    missing = words.keys() - found
    if missing:
        raise SystemExit(f"{' '.join(command)}: ended before it was {', '.join(sorted(missing))}")
    return found


def measured(target: str, device: str) -> dict[str, float]:
    """Returns the seconds to each moment of both."""
    plain = moments_of([__file__, "--plain", "--device", device, target], {"plain": "trained"})
    with tempfile.TemporaryDirectory() as folder:
        files = ["--study", folder, "-o", f"{folder}/policy.yaml"]
        command = ["-m", "amptune", "tune", target, "--budget", "120s", "--device", device, *files]
        return plain | moments_of(command, MOMENTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--device", default="cpu", help="as of amptune tune: cpu, cuda:0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="train one step of the target, and nothing else")
    given = parser.parse_args()
    if given.plain:
        train_one_step(given.targets[0], given.device)
        return
    for target in given.targets:
        _, *rows = [measured(target, given.device) for _ in range(1 + given.repeats)]
        medians = {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
        print(
            json.dumps({"target": target, **medians, "ratio": round(medians["built"] / medians["plain"], 2)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
