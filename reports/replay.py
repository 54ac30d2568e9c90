"""Tunes a synthetic machine many times, where the truth is known: how good are the answers, and are the claims true?

    python reports/replay.py --tunings 1000 --out reports/replay
    python reports/replay.py --tunings 0 --null 200 --aa 1000 --out reports/replay

Each tuning is the whole of `amptune tune` on the landscape of `tests/simulated/landscape.py` (over 10,000 policies a
workload, calibrated on an H200; noise, drift, outliers and launches that differ), in simulated time. `--null` tunes
landscapes on which no policy is faster than stock; `--aa` compares one policy with itself. Writes OUT/replay.json,
one row a tuning or comparison, and prints tables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

# The landscape is made for the tests and lives among them; it is no part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from simulated.landscape import WORKLOADS, Replay, Trouble, replay, same_twice, trouble_of  # found by the line above

from amptune.search.sampler.policy_sampler import sampler_named
from amptune.search.table.ratio import Ratio

Row = TypeVar("Row")

GOOD_REGRET = 0.02
# A gain that ought to be found.
WORTHWHILE = 1.10
# On these nothing is faster than stock: all equal, or all others slower by up to 5 %.
NULL_LANDSCAPES = (0.0, 0.05)


@dataclass(frozen=True)
class Job:
    """One tuning to do; picklable."""

    workload: str
    seed: int
    budget_s: float
    trouble: Trouble
    flat: float | None = None
    sampler: str = "amptune"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tunings", type=int, default=1000, help="in all, the workloads in turn")
    parser.add_argument("--null", type=int, default=0, metavar="N", help="tunings where nothing is faster than stock")
    parser.add_argument("--aa", type=int, default=0, metavar="N", help="comparisons of a policy with itself")
    parser.add_argument("--budget", type=float, default=300.0, help="simulated seconds a tuning")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--sampler", choices=("amptune", "tpe", "gp", "random"), default="amptune")
    parser.add_argument("--seed", type=int, default=0, help="of the first tuning; the others count on from it")
    parser.add_argument(
        "--trouble",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="of the fields of tests/simulated/landscape.Trouble",
    )
    arguments = parser.parse_args()
    trouble = trouble_of(arguments.trouble)
    workloads = tuple(arguments.workloads) or WORKLOADS

    def jobs(count: int) -> list[Job]:
        seeds = range(arguments.seed, arguments.seed + count)
        return [
            Job(workloads[seed % len(workloads)], seed, arguments.budget, trouble, sampler=arguments.sampler)
            for seed in seeds
        ]

    nulls = [replace(job, flat=NULL_LANDSCAPES[job.seed % 2]) for job in jobs(arguments.null)]
    started = time.monotonic()
    with ProcessPoolExecutor(max_workers=arguments.jobs) as pool:
        rows = done(pool, tuned, jobs(arguments.tunings))
        null_rows = done(pool, tuned, nulls)
        aa_rows = done(pool, compared_with_itself, jobs(arguments.aa))
    arguments.out.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": "amptune.replay/1",
        "command": " ".join(["python", *sys.argv]),
        "trouble": asdict(trouble),
        "budget_s": arguments.budget,
        "wall_s": round(time.monotonic() - started, 1),
        "tunings": [_row(row) for row in rows],
        "null": [{**_row(row), "slower_by": job.flat} for row, job in zip(null_rows, nulls, strict=True)],
        "aa": [[round(number, 5) for number in (ratio.value, ratio.low, ratio.high)] for ratio in aa_rows],
    }
    (arguments.out / "replay.json").write_text(json.dumps(data, indent=1) + os.linesep)
    for text in (table(rows), null_table(null_rows), aa_table(aa_rows)):
        print(text)
    return 0


def done(pool: ProcessPoolExecutor, work: Callable[[Job], Row], jobs: Sequence[Job]) -> list[Row]:
    """Every job's result, in the order of the jobs."""
    rows: list[Row] = []
    for row in pool.map(work, jobs, chunksize=4):
        rows.append(row)
        if len(rows) % 50 == 0:
            print(f"{len(rows)} of {len(jobs)}", file=sys.stderr)
    return rows


def tuned(job: Job) -> Replay:
    with tempfile.TemporaryDirectory() as folder:
        return replay(
            job.workload,
            job.seed,
            job.trouble,
            budget_s=job.budget_s,
            folder=Path(folder),
            flat=job.flat,
            sampler=sampler_named(job.sampler, job.seed),
        )


def compared_with_itself(job: Job) -> Ratio:
    return same_twice(job.workload, job.seed, job.trouble, budget_s=job.budget_s)


def table(rows: Sequence[Replay]) -> str:
    """What became of the tunings, by workload, as Markdown. Regret is in samples per second, in percent.

    "Best tried" and "best compared" are the median regrets of those: where the regret comes from. "Confirmed", "claim
    holds" (its interval has the truth) and "holds later" (it has the ratio of a later sitting) are shares of the
    claims, "confirmed wrong" (nothing is faster) of the confirmed ones. "Left open" is how often stock PyTorch is kept,
    undecided or not, where something is at least 10 % faster.
    """
    if not rows:
        return ""
    by_workload = defaultdict(list)
    for row in rows:
        by_workload[row.workload].append(row)
    heads = (
        "workload", "tunings", "regret ≤ 2 %", "median regret", "99th pct", "best tried", "best compared",
        "false “faster”", "confirmed", "confirmed wrong", "claim holds", "holds later", "claim ±", "left open",
        "trials", "launches", "simulated",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [_line(name, own) for name, own in [*sorted(by_workload.items()), ("**all**", list(rows))]]
    return "\n".join(lines) + "\n"


def _line(name: str, rows: Sequence[Replay]) -> str:
    claims = [row for row in rows if row.claim is not None]
    widths = [(row.claim[2] - row.claim[1]) / 2 / row.claim[0] for row in rows if row.claim is not None]
    confirmed = [row for row in claims if row.confidence == "confirmed"]
    worthwhile = [row for row in rows if best_speedup(row) >= WORTHWHILE]
    cells = [
        name,
        str(len(rows)),
        _percent(statistics.fmean(row.regret <= GOOD_REGRET for row in rows)),
        _percent(statistics.median(row.regret for row in rows)),
        _percent(float(np.quantile([row.regret for row in rows], 0.99))),
        _percent(statistics.median(row.search_regret for row in rows)),
        _percent(statistics.median(row.finals_regret for row in rows)),
        _percent(statistics.fmean(row.claims_falsely for row in rows)),
        _share(confirmed, claims),
        _share([row for row in confirmed if row.claims_falsely], confirmed),
        _share([row for row in claims if row.claim_holds], claims),
        _share([row for row in claims if row.next_holds], claims),
        _percent(statistics.median(widths)) if widths else "-",
        _share([row for row in worthwhile if row.claim is None], worthwhile),
        f"{statistics.median(row.trials for row in rows):.0f}",
        f"{statistics.median(row.launches for row in rows):.0f}",
        f"{statistics.median(row.simulated_s for row in rows):.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def best_speedup(row: Replay) -> float:
    """The true speed of the best policy over the baseline's."""
    return row.true_speedup * (1 + row.regret)


def null_table(rows: Sequence[Replay]) -> str:
    """How often something is claimed where nothing is faster."""
    if not rows:
        return ""
    claims = [row for row in rows if row.claim is not None]
    return _small_table(
        {
            "tunings where nothing is faster": str(len(rows)),
            "claimed faster": _share(claims, rows),
            "confirmed": _share([row for row in claims if row.confidence == "confirmed"], rows),
        }
    )


def aa_table(ratios: Sequence[Ratio]) -> str:
    """How often a policy is found to be as fast as itself."""
    if not ratios:
        return ""
    return _small_table(
        {
            "comparisons of a policy with itself": str(len(ratios)),
            "no difference shown": _percent(statistics.fmean(ratio.low <= 1 <= ratio.high for ratio in ratios)),
            "± (median)": _percent(statistics.median(ratio.half_width for ratio in ratios)),
            "launches (median)": f"{statistics.median(ratio.launches for ratio in ratios):.0f}",
        }
    )


def _small_table(cells: Mapping[str, str]) -> str:
    return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|\n| {' | '.join(cells.values())} |\n"


def _row(row: Replay) -> dict[str, Any]:
    numbers = {name: round(value, 5) if isinstance(value, float) else value for name, value in asdict(row).items()}
    return {**numbers, "claim": row.claim and [round(value, 5) for value in row.claim]}


def _share(some: Sequence[Replay], of: Sequence[Replay]) -> str:
    return _percent(len(some) / len(of)) if of else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
