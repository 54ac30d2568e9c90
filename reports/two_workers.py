"""How much sooner are two workers as sure as one?

    python reports/two_workers.py amptune.workload.zoo:resnet50 --budget 300 --out reports/h100/two_workers

One worker tunes on the first GPU and, beside it, two on the next two, for the same time, with caches of their own and
as many CPU cores for each GPU. Then the verdict is made anew of what each study knew at every moment, counted from its
first measurement: when is the interval of two workers, around the gain of their best policy, as narrow as that of one
at its end? `--show` prints that for studies that are there already.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from amptune.search.sampler.records import StudyRecord
from amptune.search.sampler.storage import recall
from amptune.search.table.verdict import verdict_of

EVERY_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--gpus", default="0,1,2", help="the first is of the one worker")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    first, *others = asked.gpus.split(",")
    if not asked.show:
        with ThreadPoolExecutor() as pool:
            cores, share = sorted(os.sched_getaffinity(0)), len(os.sched_getaffinity(0)) // (1 + len(others))
            arms = [("one", [first], cores[:share]), ("two", others, cores[share:])]
            list(pool.map(lambda arm: tuned(asked.target, asked.budget, asked.out, *arm), arms))
    courses = {arm: course_of(recall(asked.out / arm / "study")) for arm in ("one", "two")}
    (asked.out / "courses.json").write_text(json.dumps(courses, indent=1) + "\n", encoding="utf-8")
    for arm, course in courses.items():
        for entry in course[:: max(1, len(course) // 12)]:
            print(arm, *entry.values())
    claims = {arm: [entry for entry in course if entry["width"] is not None] for arm, course in courses.items()}
    last = claims["one"][-1]
    sooner = next((entry for entry in claims["two"] if entry["width"] <= last["width"]), None)
    print("one at its end:", last)
    print("two as narrow:", sooner)
    if sooner is not None:
        print(f"{last['at_s'] / sooner['at_s']:.2f} times sooner")


def tuned(target: str, budget_s: float, out: Path, arm: str, gpus: Sequence[str], cores: Sequence[int]) -> None:
    folder = out / arm
    folder.mkdir(parents=True, exist_ok=True)
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    command = ["taskset", "-c", ",".join(map(str, cores))]
    command += [sys.executable, "-m", "amptune", "tune", target, "--workers", str(len(gpus)), "--compile"]
    command += ["--budget", f"{budget_s:g}s", "--study", str(folder / "study"), "-o", str(folder / "policy.yaml")]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        subprocess.run(command, env={**os.environ, **own}, stdout=log, stderr=log, check=True, timeout=budget_s + 120)  # noqa: S603


def course_of(record: StudyRecord) -> list[dict[str, Any]]:
    """Returns the answer at every moment: the policy, its gain, and the width of its 95 % interval (high over low)."""
    moments = [row.moment_s for row in record.table]  # of workers of one host by one clock
    bar = lambda policy: record.judgements.bar(policy, is_outside=policy in record.outside)  # noqa: E731
    course = []
    for step in range(1, math.ceil((max(moments) - min(moments)) / EVERY_S) + 1):
        known = [row for row in record.table if row.moment_s - min(moments) <= step * EVERY_S]
        verdict = verdict_of(known, record.last.baseline, record.machine, bar=bar)
        if verdict is not None:
            gain = verdict.speedup
            course.append(
                {
                    "at_s": step * EVERY_S,
                    "rows": len(known),
                    "policy": str(verdict.winner.policy),
                    "gain": round(gain.value, 4),
                    "width": None if verdict.keeps_the_baseline else round(gain.high / gain.low, 4),
                }
            )
    return course


if __name__ == "__main__":
    main()
