"""Does a step that is recorded whole train as the same step unrecorded? On the models of `host_bound_models.py`.

    python reports/whole_steps.py --out whole_steps.jsonl --lanes 4

Each trains twice by `tuned.training_step`, recorded and not, from one seed and on the same batches, with deterministic
kernels: 50 steps in IEEE FP32, after which all weights, buffers and states of optimizers are compared, and 2,000 steps
in bf16, or as many as the unrecorded one takes in 40 s, of which all losses are. Appends a line to FILE as each model
is done, and leaves out what stands there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from host_bound_models import MODELS  # beside this program
from lanes import EARLIER_S, Job, end_with_parent, lanes_of, run
from plain_loop import one_call, seed_all

from amptune.changes.tensor_tree import moved_to
from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.search.plan.budget import Budget
from amptune.workload.targets import load_workload, parse_target

FP32 = Policy(fp32_math="ieee", fused_optimizer=True)
BF16 = Policy(autocast="bf16", fused_optimizer=True)
STEPS, LONG_STEPS, BATCHES = 50, 2000, 16
MOST_S, EXPECTED_S = 40.0, 70.0
TARGET = str(Path(__file__).resolve().with_name("host_bound_models.py"))


def trained(name: str, policy: Policy, steps: int, device: str) -> dict[str, Any]:
    """Returns losses, and what is left after training: weights, buffers, states of optimizers."""
    workload = load_workload(parse_target(f"{TARGET}:{name}"))
    seed_all()
    model = workload.model().to(device)
    tuned = apply(policy, model, guard=False)
    train, optimizers = one_call(tuned, workload, model)
    seed_all()
    move = lambda tensor: tensor.to(device)  # noqa: E731
    batches = [moved_to(torch.device(device), workload.batch(workload.batch_size), move) for _ in range(BATCHES)]
    seed_all()
    recorded = policy.cuda_graphs is not False
    began_s = time.perf_counter()
    found: list[torch.Tensor] = []
    while len(found) < steps and (recorded or time.perf_counter() - began_s < MOST_S):
        found.append(train(batches[len(found) % BATCHES]))
    losses = torch.stack(found).tolist()
    recordings = tuned.recordings
    return {
        "losses": losses,
        "state": [model.state_dict(), *(one.state_dict()["state"] for one in optimizers)],
        "seconds": round(time.perf_counter() - began_s, 1),
        "replays": None if recordings is None else recordings.calls,
        "told": [str(finding) for finding in tuned.findings],
    }


def compared(name: str, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "card": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    for policy, steps, what in ((FP32, STEPS, "fp32"), (BF16, LONG_STEPS, "bf16")):
        own = trained(name, policy, steps, device)
        recorded = trained(name, replace(policy, cuda_graphs="step"), len(own["losses"]), device)
        apart = [abs(a - b) for a, b in zip(own["losses"], recorded["losses"], strict=True)]
        first = next((step for step, one in enumerate(apart) if one != 0), None)
        row[what] = {
            "steps": len(own["losses"]),
            "replays": recorded["replays"],
            "first_other_loss": first,
            "same_state": alike(own["state"], recorded["state"]),
            "last_losses": [sum(one["losses"][-100:]) / len(one["losses"][-100:]) for one in (own, recorded)],
            "finite": all(map(math.isfinite, recorded["losses"])),
            "seconds": [own["seconds"], recorded["seconds"]],
            "told": recorded["told"],
        }
    return row


def alike(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lanes", type=int, default=1, metavar="N", help="GPUs of this host to use (default 1)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="for the whole command")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        end_with_parent()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        row = compared(asked.one, asked.device)
        with asked.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return 0
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    command = (sys.executable, __file__, f"--out={asked.out}", f"--device={asked.device}")
    left = [name for name in asked.models if name not in {row["model"] for row in rows}]
    jobs = [Job(name=name, command=(*command, f"--one={name}"), expected_s=EXPECTED_S) for name in left]
    limit = Budget(seconds=asked.limit)

    def next_job(running: Any, failed: Any, left_s: float) -> Job | None:
        begun.update(job.name for job in (*running, *failed))
        able = (job for job in jobs if job.name not in begun and job.expected_s <= left_s - EARLIER_S)
        found = next(able, None)
        begun.update([found.name] if found else [])
        return found

    begun: set[str] = set()
    failed = run(lanes_of(asked.lanes, gpus=asked.device != "cpu"), next_job, limit)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
