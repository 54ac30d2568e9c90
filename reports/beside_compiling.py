"""What is measured while graphs compile in the background: how much slower is it, and does stopping them help?

    python reports/beside_compiling.py reports/foreign_models.py:t5_base amptune.workload.zoo:resnet50 --out OUT.jsonl

Measures the bf16 recipe and its `default` graph alone. Then other graphs compile, from empty caches, and both are
measured again and again: in turn while the compilers stand still for each block, as in a tuning, and while they go on.
Appends a line for each workload and prints a table. A measurement is wrong if it is 5 % slower than alone. It is not
quiet if compilers went on during its block though they were to stand still.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from json_lines import append  # beside this program
from plain_loop import compile_caches

from amptune.measure.bench.stillness import ProcessIdentity
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Failure, Measurement
from amptune.measure.workers.processes import WorkerProcess
from amptune.measure.workers.source import Source
from amptune.policy.settings import Policy, amp_recipe
from amptune.search.trials import BRIEF

EAGER = amp_recipe("bf16")
MEASURED = {"eager": EAGER, "default": EAGER.compiled("default")}
OTHERS = (EAGER.compiled("reduce-overhead"), amp_recipe("fp16").compiled("default"))
ALONE = 5
LIMIT_S, WRONG = 300.0, 1.05


@dataclass
class OneThatMayNotStop(WorkerEvaluator):
    """Lets the compilers go on while blocks are timed, unless they are to `stand_still`."""

    stand_still: bool = True

    def _beside(self, process: WorkerProcess) -> tuple[ProcessIdentity, ...]:
        return super()._beside(process) if self.stand_still else ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print("| workload | policy | alone, ms | they go on: ms | wrong | they stand still: ms | wrong | not quiet | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for target in arguments.targets:
        line = measured(target, arguments.device)
        append(arguments.out, line)
        print("\n".join(rows(line)), flush=True)
    return 0


def measured(target: str, device: str | None, others: Sequence[Policy] = OTHERS) -> dict[str, Any]:
    """Returns what was measured alone and beside `others`, and the seconds that each graph took without its pauses."""
    with begun(target, device) as evaluator:
        compiled: dict[Policy, float | Failure] = {}
        for policy in MEASURED.values():
            if policy.compile != "off":
                evaluator.begin_compiling(policy, LIMIT_S)
                compiled |= evaluator.compiled(LIMIT_S)
            evaluator.measure(policy, BRIEF)  # the first steps start the libraries
        alone = [{"policy": name, **one(evaluator, MEASURED[name])} for name in (*MEASURED,) * ALONE]
        began_s = time.monotonic()
        for policy in others:
            evaluator.begin_compiling(policy, LIMIT_S)
        beside: list[dict[str, Any]] = []
        while evaluator.compiling and time.monotonic() - began_s < LIMIT_S:
            for name, evaluator.stand_still in product(MEASURED, (False, True)):
                how = {"policy": name, "still": evaluator.stand_still, "at_s": round(time.monotonic() - began_s, 1)}
                answer = one(evaluator, MEASURED[name])
                compiled |= evaluator.compiled()
                if evaluator.compiling:  # else some of the block had nothing beside it
                    beside.append({**how, **answer})
    seconds = {
        f"{policy.precision} {policy.compile}": answer if isinstance(answer, float) else str(answer)
        for policy, answer in compiled.items()
    }
    return {"target": target, "alone": alone, "beside": beside, "compiled": seconds}


@contextmanager
def begun(target: str, device: str | None) -> Iterator[OneThatMayNotStop]:
    """Yields an evaluator that has built the workload, with empty compiler caches."""
    with (
        tempfile.TemporaryDirectory() as folder,
        compile_caches(Path(folder) / "caches"),
        closing(OneThatMayNotStop(Source(target=target), device, Path(folder) / "workers.log")) as evaluator,
    ):
        evaluator.prepare(LIMIT_S)
        yield evaluator


def one(evaluator: WorkerEvaluator, policy: Policy) -> dict[str, Any]:
    outcome = evaluator.measure(policy, BRIEF)
    if not isinstance(outcome, Measurement):
        sys.exit(f"{policy}: {outcome}")
    return {
        "ms": outcome.mean_ms,
        "discarded": list(outcome.discarded),
        "contaminated_by": list(outcome.contaminated_by),
    }


def rows(line: dict[str, Any]) -> Iterator[str]:
    """Yields a row of the table for each policy that was measured."""
    seconds = ", ".join(f"{graph} {took:.0f}" for graph, took in line["compiled"].items() if isinstance(took, float))
    for name in dict.fromkeys(one["policy"] for one in line["alone"]):
        alone = statistics.median(one["ms"] for one in line["alone"] if one["policy"] == name)
        on, still = (
            [one for one in line["beside"] if (one["policy"], one["still"]) == (name, stopped)]
            for stopped in (False, True)
        )
        loud = sum("compiling" in one["contaminated_by"] for one in still)
        yield (
            f"| {line['target'].rpartition(':')[2]} | {name} | {alone:.2f} | {figures(on, alone)} | "
            f"{figures(still, alone)} | {loud} | {seconds} |"
        )


def figures(measurements: Sequence[dict[str, Any]], alone_ms: float) -> str:
    """Returns the median with the extremes, and how many are wrong."""
    times = [one["ms"] for one in measurements] or [float("nan")]
    wrong = sum(ms > WRONG * alone_ms for ms in times)
    return f"{statistics.median(times):.2f} [{min(times):.2f}, {max(times):.2f}] | {wrong} of {len(measurements)}"


if __name__ == "__main__":
    sys.exit(main())
