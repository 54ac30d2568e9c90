"""Seconds from `amptune.apply` to a compiled policy's 1st, 3rd and 100th step: without artifacts, with them, and warm.

    python reports/compiled_once.py --out reports/NAME/compiled_once.jsonl zoo:resnet18:32 llama_150m
    python reports/compiled_once.py --out FILE --modes default blocks --rules '**.norm*' -- small_transformer

A model is one of `knobs.py`, or `small_transformer`, which a CPU compiles in half a minute. Of each model and mode, one
process compiles as a tuner's worker does and keeps the artifacts; then one trains with empty caches, one with its
caches (warm), and one with empty caches and the artifacts. The GPU is used if there is one. A line has the counts of
the compiler's caches too: hits and misses of Inductor, and of AOTAutograd with the graphs that it does not cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from knobs import plain_for, workload_of  # beside this program
from torch import nn

import amptune
from amptune.changes.tensor_tree import map_tensors
from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Failure
from amptune.measure.workers.kept_artifacts import keep_artifacts
from amptune.measure.workers.worker import A_FEW_STEPS
from amptune.policy.artifact_file import kept_in
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import Fp32Rule, Policy
from amptune.workload.workload import Workload

BATCHES, TOLD_STEPS = 4, (1, 3, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", default=["default"])
    parser.add_argument("--rules", nargs="*", default=[], metavar="PATH", help="modules kept in FP32")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        task, policy, kept = arguments.child
        print(json.dumps(child(task, policy_from_dict(json.loads(policy)), built(arguments.models[0]), Path(kept))))
        return
    for model in arguments.models:
        plain = replace(plain_for(built(model)), fp32_modules=tuple(Fp32Rule(path=path) for path in arguments.rules))
        for mode in arguments.modes:
            line = measured(model, plain.compiled(mode))
            with arguments.out.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)


def built(model: str) -> Workload:
    return small_transformer() if model == "small_transformer" else workload_of(model)


def small_transformer() -> Workload:
    """Six layers of width 64 on sequences of 16."""

    def model() -> nn.Module:
        layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(6)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 8))

    return Workload(
        model=model,
        batch=lambda n: (torch.randn(n, 16, 64), torch.randint(8, (n,))),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        batch_size=8,
        name="small_transformer",
    )


def measured(model: str, policy: Policy) -> dict[str, Any]:
    """Returns the seconds of each way to start, every one in a process of its own."""
    line: dict[str, Any] = {"model": model, "policy": policy_to_dict(policy), "torch": str(torch.__version__)}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        caches = {"tuner": "tuner", "empty caches": "own", "warm caches": "own", "artifacts": "other"}
        for task, cache in caches.items():
            line[task] = in_a_process(task, model, policy, kept, Path(folder) / cache)
        line["artifacts_mib"] = round(kept_in(kept, policy).stat().st_size / 2**20, 2)
    return line


def in_a_process(task: str, model: str, policy: Policy, kept: Path, cache: Path) -> Any:
    told = [task, json.dumps(policy_to_dict(policy)), str(kept)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)  # Triton's lies in it
    command = [sys.executable, __file__, model, "--out", os.devnull, "--child", *told]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603  # itself
    return json.loads(done.stdout.splitlines()[-1])


def child(task: str, policy: Policy, workload: Workload, kept: Path) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return tuner(policy, workload, device, kept) if task == "tuner" else training(task, policy, workload, device, kept)


def tuner(policy: Policy, workload: Workload, device: torch.device, kept: Path) -> dict[str, Any]:
    outcome = Bench(workload, device).measure(policy, replace(A_FEW_STEPS, time_limit_s=600.0))
    if isinstance(outcome, Failure):
        raise SystemExit(str(outcome))
    keep_artifacts(policy, outcome, device, kept)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"device": name, "startup_s": round(outcome.startup_s, 2)}


def training(task: str, policy: Policy, workload: Workload, device: torch.device, kept: Path) -> dict[str, Any]:
    assert workload.loss is not None  # noqa: S101  # those of this program have one
    batches = [workload.batch(workload.batch_size) for _ in range(BATCHES)]
    batches = [map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches]
    model, seconds = workload.model().to(device), {}
    began_s = time.perf_counter()
    tuned = amptune.apply(policy, model, artifacts=kept_in(kept, policy) if task == "artifacts" else None)
    train = tuned.training_step(workload.loss, tuned.optimizer(workload.optimizer(model)))
    for step in range(1, max(TOLD_STEPS) + 1):
        train(batches[step % BATCHES])
        if step in TOLD_STEPS:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[f"step_{step}_s"] = round(time.perf_counter() - began_s, 2)
    from torch._dynamo.utils import counters

    counts = {name: count for kind in ("inductor", "aot_autograd") for name, count in counters[kind].items()}
    return {**seconds, "caches": {name: count for name, count in counts.items() if "cache" in name}}


if __name__ == "__main__":
    main()
