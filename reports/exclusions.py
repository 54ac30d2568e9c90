"""What keeping modules in FP32 buys, and running them in half: proposed by the tool, measured in turn.

    python reports/exclusions.py --out reports/numerics/exclusions_h200

For each workload and memory format, every module is timed by itself (`amptune.measure.modules.sensitivity_pass`);
the first rungs of the ladder that follows from that are then timed against plain bf16 autocast, all in turn, round
after round in one process.
FP32 is TF32 where the GPU has it. Writes OUT.json with the samples, and prints a table. `--sensing` times the
instrumented step alone, on a model of 1,000 modules too, and says what memory it takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comparison import rows_of  # beside this program
from torch import nn

from amptune.measure.bench.bench import Bench
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.modules.sensitivity_pass import sense
from amptune.measure.results.half_effects import Half, Sensitivity
from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import Policy
from amptune.search.space.exclusions import ladder_by_time
from amptune.search.table.effects import machine_of
from amptune.search.table.ratio import Ratio
from amptune.search.table.verdict import verdict_of
from amptune.workload.targets import load_workload, parse_target
from amptune.workload.workload import Workload

WORKLOADS = (
    ("conv1", "contiguous"),
    ("vgg16", "channels_last"),
    ("vgg16", "contiguous"),
    ("resnet50", "channels_last"),
    ("bert_base", "contiguous"),
)
SENSED = ("conv1", "mlp3", "resnet18", "resnet50", "vgg16", "densenet161", "seresnext50", "deeplabv3plus", "bert_base")
RUNGS = 3
EFFORT = Effort(warmup_s=0.5, measure_s=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sensing", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    if options.sensing is None:
        for name, memory_format in WORKLOADS:
            for row in _measured(name, memory_format, device, options.rounds):
                print(*(f"{key}={value}" for key, value in row.items() if key != "step_ms"), flush=True)
                rows.append(row)
    else:
        for name in options.sensing or (*SENSED, "thousand"):
            rows.append(_sensed(name, device))
            print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": where, "torch": torch.__version__, "rows": rows}
    options.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _measured(name: str, memory_format: Any, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    bench = Bench(load_workload(parse_target(f"amptune.workload.zoo:{name}")), device)
    math: Any = "tf32" if device.type == "cuda" else "stock"
    sensitivity = sense(bench, Policy(fp32_math=math, memory_format=memory_format), ("bf16",))
    ladder = ladder_by_time(inspect_model(bench, ""), {memory_format: sensitivity})
    plain = Policy(autocast="bf16", fp32_math=math, memory_format=memory_format)
    depths = range(1, 1 + min(RUNGS, len(ladder.timed["bf16", memory_format])))
    policies = [plain, *(replace(plain, fp32_modules=ladder.rules(depth, "bf16", memory_format)) for depth in depths)]
    if ladder.half:
        policies.append(replace(plain, half_modules=ladder.half))
    rows = rows_of((name, [(policy, bench.measure(policy, EFFORT)) for policy in policies]) for _ in range(rounds))
    verdict = verdict_of(rows, plain, machine_of("cuda" if device.type == "cuda" else "cpu"))
    for policy in policies:
        own = [row.outcome.mean_ms for row in rows if row.policy == policy and isinstance(row.outcome, Measurement)]
        ratio = verdict.scores.between(policy, plain) if verdict is not None else None
        yield _row(name, policy, own, ratio)


def _row(name: str, policy: Policy, own: list[float], ratio: Ratio | None) -> dict[str, Any]:
    reasons = [rule.reason.saves_ms for rule in policy.fp32_modules if rule.reason is not None]
    return {
        "workload": name,
        "policy": str(policy),
        "expected_to_save_ms": reasons,
        "ms": round(statistics.median(own), 4) if own else None,
        "speed_over_plain": ratio and round(ratio.value, 4),
        "ci95": ratio and [round(ratio.low, 4), round(ratio.high, 4)],
        "step_ms": [round(value, 4) for value in own],
    }


def _sensed(name: str, device: torch.device) -> dict[str, Any]:
    target = f"amptune.workload.zoo:{name}"
    bench = Bench(_thousand() if name == "thousand" else load_workload(parse_target(target)), device)
    dtypes: tuple[Half, ...] = ("bf16", "fp16") if device.type == "cuda" else ("bf16",)
    outcome = bench.measure(Policy(), EFFORT)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sensitivity: Sensitivity = sense(bench, Policy(), dtypes)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    return {
        "workload": name,
        "modules": len(sensitivity.modules),
        "left_out": len(sensitivity.left_out),
        "seconds": round(sensitivity.seconds, 2),
        "step_ms": round(sensitivity.step_ms, 2),
        "peak_mib": peak and round(peak),
        "peak_mib_of_training": round(outcome.peak_allocated_mib) if isinstance(outcome, Measurement) else None,
    }


def _thousand() -> Workload:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 512))

    return Workload(
        model=lambda: nn.Sequential(*(block() for _ in range(250))),
        batch=lambda n: torch.randn(n, 512),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
        batch_size=256,
        name="thousand",
    )


if __name__ == "__main__":
    main()
