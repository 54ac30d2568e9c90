"""What is measured while graphs compile in the background: how much slower is it, and is that noticed?

    python reports/beside_compiling.py amptune.workload.zoo:resnet50 train.py:workload --out beside.jsonl

Measures the bf16 recipe alone, then again and again while its graphs compile with CUDA graphs and without, from empty
caches. Appends a line for each workload and prints a table. A measurement is wrong if it is 5 % slower than alone; it
is noticed if it kept a disturbance that was seen, repeated blocks having been discarded before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from oracle import append, compile_caches  # beside this program

from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Failure, Measurement
from amptune.measure.workers.worker import Source
from amptune.policy.settings import CompileMode, Policy, amp_recipe
from amptune.search.trials import BRIEF

MODES: tuple[CompileMode, ...] = ("reduce-overhead", "default")
ALONE = 5
LIMIT_S, WRONG = 300.0, 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print("| workload | alone, ms | beside, ms | slowest kept as undisturbed | wrong | noticed | compiling, s |")
    print("|---|---|---|---|---|---|---|")
    for target in arguments.targets:
        line = measured(target, arguments.device)
        append(arguments.out, line)
        print(row(line), flush=True)
    return 0


def measured(target: str, device: str | None, modes: tuple[CompileMode, ...] = MODES) -> dict[str, Any]:
    """Returns the medians alone and beside, in ms, with what each noticed; and the seconds of each graph."""
    eager = amp_recipe("bf16")
    compiled: dict[str, float | Failure] = {}
    beside: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        compile_caches(Path(folder) / "caches"),
        WorkerEvaluator(Source(target=target), device, Path(folder) / "workers.log") as evaluator,
    ):
        evaluator.build_ahead(len(modes))
        evaluator.prepare(LIMIT_S)
        evaluator.measure(eager, BRIEF)  # the first steps start the libraries
        alone = [one(evaluator, eager) for _ in range(ALONE)]
        began_s = time.monotonic()
        for mode in modes:
            evaluator.begin_compiling(eager.compiled(mode), LIMIT_S)
        while evaluator.compiling and time.monotonic() - began_s < LIMIT_S:
            beside.append({"at_s": round(time.monotonic() - began_s, 1), **one(evaluator, eager)})
            compiled |= {policy.compile: answer for policy, answer in evaluator.compiled().items()}
    return {
        "target": target,
        "alone": alone,
        "beside": beside,
        "compiled": {mode: answer if isinstance(answer, float) else str(answer) for mode, answer in compiled.items()},
    }


def one(evaluator: WorkerEvaluator, policy: Policy) -> dict[str, Any]:
    outcome = evaluator.measure(policy, BRIEF)
    if not isinstance(outcome, Measurement):
        sys.exit(f"{policy}: {outcome}")
    return {
        "ms": outcome.mean_ms,
        "discarded": list(outcome.discarded),
        "contaminated_by": list(outcome.contaminated_by),
    }


def row(line: dict[str, Any]) -> str:
    alone = statistics.median(one["ms"] for one in line["alone"])
    ratios = {place: one["ms"] / alone for place, one in enumerate(line["beside"])}
    noticed = {place for place, one in enumerate(line["beside"]) if "compiling" in one["contaminated_by"]}
    wrong = {place for place, ratio in ratios.items() if ratio > WRONG}
    clean = [ratio for place, ratio in ratios.items() if place not in noticed]
    beside = statistics.median(one["ms"] for one in line["beside"]) if ratios else float("nan")
    seconds = ", ".join(f"{mode} {took:.0f}" for mode, took in line["compiled"].items() if isinstance(took, float))
    return (
        f"| {line['target'].rpartition(':')[2]} | {alone:.2f} | {beside:.2f} | {max(clean, default=1.0):.2f} × | "
        f"{len(wrong)} of {len(ratios)} | {len(wrong & noticed)} | {seconds} |"
    )


if __name__ == "__main__":
    sys.exit(main())
