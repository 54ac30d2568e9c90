"""Tunes bundled workloads on this machine, and holds each policy against what one would otherwise use.

    python reports/compare.py --out reports/h200 --budget 100 resnet50 vgg16 …

For each workload, in this order: `amptune.tune` with the budget; an exhaustive grid over autocast × FP32 math
× memory format × cudnn.benchmark; and one interleaved comparison of stock PyTorch, IEEE FP32, TF32, the AMP
recipe in fp16 and bf16, the grid's best and the tuned policy. Writes OUT/WORKLOAD.json (every outcome, raw
samples included) and OUT/WORKLOAD.policy.yaml; `python reports/compare.py --out OUT --table` prints the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comparison import measured_in_turn, rounds_of  # beside this program

from amptune.errors import AmptuneError
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Measurement, Outcome, outcome_from_dict, outcome_to_dict
from amptune.measure.results.subject import Prepared
from amptune.measure.workers.source import Source
from amptune.policy.file_io import save
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.report.progress import progress_for
from amptune.search.api import tune
from amptune.search.plan.budget import Budget
from amptune.search.table.contenders import Contender
from amptune.search.table.effects import machine_of
from amptune.search.table.verdict import Verdict, verdict_of
from amptune.workload.zoo import NAMES

FINALS_S = 45.0
GRID_EFFORT = Effort(warmup_s=1.0, measure_s=0.3, min_steps=4, time_limit_s=120.0)
HOPELESS = 2.5


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    name: str
    policy: Policy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[], metavar="WORKLOAD", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=100.0, help="seconds of tuning per workload")
    parser.add_argument("--device", default=None)
    parser.add_argument("--reuse-grid", type=Path, metavar="DIR", help="take the grid from the report in DIR")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        for name in arguments.workloads or NAMES:
            report(name, arguments.out, arguments.budget, arguments.device, arguments.reuse_grid)
    print(table(arguments.out))
    return 0


def report(name: str, out: Path, budget_s: float, device: str | None, reuse: Path | None) -> None:
    """Measures one workload and writes its evidence."""
    target = f"amptune.workload.zoo:{name}"
    with tempfile.TemporaryDirectory() as folder, progress_for(sys.stderr) as observer:
        started = time.monotonic()
        try:
            decision = tune(target, budget_s=budget_s, device=device, study=folder, observer=observer)
        except AmptuneError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return
        tuning_s = time.monotonic() - started
        save(decision.policy_file, out / f"{name}.policy.yaml")
        evaluator = WorkerEvaluator(Source(target=target), device, Path(folder) / "workers.log")
        try:
            prepared = evaluator.prepare(300.0)
            grid = earlier_grid(name, reuse) if reuse else measure_grid(evaluator, prepared, decision.policy.batch_size)
            columns = columns_of(decision.policy, grid)
            policies = list(dict.fromkeys(column.policy for column in columns))
            budget = Budget(seconds=FINALS_S)
            rows = measured_in_turn(evaluator, prepared, policies, budget, observer, tried=grid.items(), seed=1)
        finally:
            evaluator.close()
    verdict = verdict_of(rows, columns[0].policy, machine_of(prepared.hardware.device))
    if verdict is None:
        print(f"{name}: stock PyTorch was not measured", file=sys.stderr)
        return
    data = {
        "schema": "amptune.report/1",
        "workload": name,
        "command": f"python reports/compare.py --out reports/{out.name} --budget {budget_s:g} {name}",
        "hardware": prepared.hardware.name,
        "software": {"torch": prepared.hardware.software.torch, "cudnn": prepared.hardware.software.cudnn},
        "tuning_s": round(tuning_s, 1),
        "trials": [_row(trial.policy, trial.outcome, seconds=trial.seconds) for trial in decision.trials],
        "grid": [_row(policy, outcome) for policy, outcome in grid.items()],
        "finals": [[_row(row.policy, row.outcome) for row in one] for one in rounds_of(rows)],
        "contenders": [_contender(column, verdict) for column in columns],
    }
    (out / f"{name}.json").write_text(json.dumps(data, indent=1) + os.linesep)


def measure_grid(evaluator: WorkerEvaluator, prepared: Prepared, batch_size: int | None) -> dict[Policy, Outcome]:
    """Every policy of the grid, once; one far behind the best is timed over two steps only."""
    convolutions = bool(prepared.subject.convolution_dims)
    grid: dict[Policy, Outcome] = {}
    best_ms = float("inf")
    for benchmark, autocast, math, layout in itertools.product(
        (False, True) if convolutions else (False,),
        ("bf16", "fp16", "off"),
        ("stock", "tf32", "ieee"),
        ("contiguous", "channels_last") if convolutions else ("contiguous",),
    ):
        policy = Policy(
            autocast=autocast,  # type: ignore[arg-type]  # itertools.product forgets the literals
            fp32_math=math,  # type: ignore[arg-type]
            memory_format=layout,  # type: ignore[arg-type]
            cudnn_benchmark=benchmark,
            batch_size=batch_size,
        )
        effort = replace(GRID_EFFORT, abandon_above_ms=HOPELESS * best_ms)
        grid[policy] = evaluator.measure(policy, effort)
        if isinstance(outcome := grid[policy], Measurement):
            best_ms = min(best_ms, outcome.mean_ms)
    return grid


def earlier_grid(name: str, folder: Path) -> dict[Policy, Outcome]:
    """The grid of an earlier report, measured once and kept; its best is timed again in the comparison."""
    rows = json.loads((folder / f"{name}.json").read_text())["grid"]
    return {policy_from_dict(row["policy"]): outcome_from_dict(_without(row, "policy")) for row in rows}


def _without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def columns_of(tuned: Policy, grid: dict[Policy, Outcome]) -> list[Column]:
    """The columns of the table. The grid's three fastest go in, since one measurement does not say which is best."""
    batch_size = tuned.batch_size
    alive = {policy: outcome for policy, outcome in grid.items() if isinstance(outcome, Measurement)}
    fastest = sorted(alive, key=lambda policy: alive[policy].mean_ms)[:3]
    return [
        Column("stock", replace(STOCK, batch_size=batch_size)),
        Column("fp32 (ieee)", Policy(fp32_math="ieee", batch_size=batch_size)),
        Column("tf32", Policy(fp32_math="tf32", batch_size=batch_size)),
        Column("amp fp16", amp_recipe("fp16", batch_size=batch_size)),
        Column("amp bf16", amp_recipe("bf16", batch_size=batch_size)),
        *(Column(f"grid {i + 1}", policy) for i, policy in enumerate(fastest)),
        Column("tuned", tuned),
    ]


def table(out: Path) -> str:
    """The evidence in OUT as a Markdown table, ms a step."""
    reports = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    columns = ["stock", "fp32 (ieee)", "tf32", "amp fp16", "amp bf16", "grid best", "tuned"]
    lines = [
        f"| workload | {' | '.join(columns)} | tuned / grid best | vs. stock | vs. AMP recipe | found in | policy |",
        "|---" * (len(columns) + 6) + "|",
    ]
    lines += [_line(report, columns) for report in reports]
    return "\n".join(lines)


def _line(report: dict[str, Any], columns: Sequence[str]) -> str:
    ms = {entry["name"]: entry.get("step_ms") for entry in report["contenders"]}
    ms["grid best"] = min(value for name, value in ms.items() if name.startswith("grid") and value is not None)
    tuned = next(entry for entry in report["contenders"] if entry["name"] == "tuned")
    recipes = [value for name, value in ms.items() if name.startswith("amp") and value is not None]
    cells = [f"{ms[name]:.3f}" if ms[name] is not None else "failed" for name in columns]
    own = ms["tuned"]
    recipe = f"{min(recipes) / own:.2f}×" if recipes else "failed"
    return (
        f"| {report['workload']} | {' | '.join(cells)} | {own / ms['grid best']:.3f} | {ms['stock'] / own:.2f}× "
        f"| {recipe} | {report['tuning_s']:.0f} s | {tuned['words']} |"
    )


def _contender(column: Column, verdict: Verdict) -> dict[str, Any]:
    contender = verdict.contender_of(column.policy) or Contender(policy=column.policy)
    ratio = contender.vs_baseline
    return {
        "name": column.name,
        "words": str(replace(column.policy, batch_size=None)),
        "policy": policy_to_dict(column.policy),
        "step_ms": contender.step_ms,
        "step_ms_ci95": contender.step_ms_ci95,
        "peak_memory_mib": contender.peak_memory_mib,
        "vs_stock": ratio and [ratio.value, ratio.low, ratio.high],
        "failure": str(contender.failure) if contender.failure else None,
    }


def _row(policy: Policy, outcome: Outcome, **more: float) -> dict[str, Any]:
    data = outcome_to_dict(outcome)
    if "step_ms" in data:
        data["step_ms"] = [round(ms, 4) for ms in data["step_ms"]]
        data["losses"] = [round(loss, 6) for loss in data["losses"]]
    return {"policy": policy_to_dict(policy), **more, **data}


if __name__ == "__main__":
    sys.exit(main())
