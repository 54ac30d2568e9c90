"""How long a launch of fresh workers takes, forked as amptune does it on Linux and spawned, and how launches differ.

    python reports/launches.py resnet18 --launches 4 --out reports/h200/search/launches.txt

Four policies that are two by name: what differs between the two of a pair is noise. Times of steps are medians in ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Measurement
from amptune.measure.workers import processes
from amptune.measure.workers.source import Source
from amptune.policy.settings import Policy

EFFORT = Effort(warmup_s=1.0, measure_s=0.4, min_steps=6)
POLICIES = [
    Policy(autocast="bf16", fp32_math=math, memory_format="channels_last", fused_optimizer=fused)
    for fused in (False, True)
    for math in ("stock", "tf32")
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = [*of_launches(arguments.workload, arguments.launches, forked=True)]
    lines += of_launches(arguments.workload, arguments.launches, forked=False)
    print("\n".join(lines))
    if arguments.out is not None:
        arguments.out.write_text("\n".join([f"{' '.join(['python', *sys.argv])}", *lines, ""]))
    return 0


def of_launches(workload: str, count: int, *, forked: bool) -> Iterator[str]:
    how = "forked" if forked else "spawned"
    context = processes._context
    if not forked:
        processes._context = processes._Spawning
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Source(target=f"amptune.workload.zoo:{workload}")
            with WorkerEvaluator(source, None, Path(folder) / "workers.log") as evaluator:
                began_s = time.monotonic()
                evaluator.prepare(300.0)
                yield f"{workload} {how}: the first worker {time.monotonic() - began_s:.2f} s"
                launches = [timed_launch(evaluator) for _ in range(count)]
    finally:
        processes._context = context
    for launch_s, times in launches:
        yield f"{workload} {how}: a launch of {len(POLICIES)} {launch_s:.2f} s; {' '.join(f'{ms:.3f}' for ms in times)}"
    of_policy = zip(*(times for _, times in launches), strict=True)
    spread = [statistics.stdev(times) / statistics.mean(times) for times in of_policy if len(times) > 1]
    yield f"{workload} {how}: SD of launches {' '.join(f'{sd:.2%}' for sd in spread)}"


def timed_launch(evaluator: WorkerEvaluator) -> tuple[float, list[float]]:
    """(seconds until all workers were ready, the time of each policy's step in ms)."""
    began_s = time.monotonic()
    evaluator.launch(POLICIES)
    launch_s = time.monotonic() - began_s
    outcomes = [evaluator.measure(policy, EFFORT) for policy in POLICIES]
    return launch_s, [one.mean_ms if isinstance(one, Measurement) else float("nan") for one in outcomes]


if __name__ == "__main__":
    sys.exit(main())
