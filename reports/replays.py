"""Whole tunings in simulated time, held against the truth: regret, true claims and questions, by budget.

    python reports/replays.py --each 250 --out reports/replay/after.json [--tree ANOTHER_CHECKOUT]
    python reports/replays.py --compare reports/replay/before.json reports/replay/after.json

Each replay is a case of `tests/frozen/decisions.py`, of the tree that is named, or of this one. Rows are added to OUT's
name with `.jsonl` as they are done, and the next command goes on there. OUT holds a summary for each budget, and rows.

Regret is the best policy's score over the chosen one's, less 1; infinite if the chosen one fails, or is slower than is
allowed. A claim is a policy other than the baseline. It is true if the true gain is at least the low end of its
interval; "inside" counts those whose gain is not above the high end either.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from json_lines import append  # beside this program

ROOT = Path(__file__).resolve().parent.parent
BUDGETS_S = (30.0, 60.0, 120.0, 300.0)
# Of ten replays eight look for speed.
OBJECTIVES = ("throughput",) * 4 + ("memory",) + ("throughput",) * 4 + ("energy",)
FIRST_SEED = 50_000
Row = dict[str, Any]
Summary = dict[str, dict[str, float | None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=250, metavar="N", help="replays of each budget (default 250)")
    parser.add_argument("--out", type=Path, default=Path("replays.json"), help="the file (default replays.json)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose search is replayed")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="JSON", help="only print what these files say")
    arguments = parser.parse_args()
    if arguments.compare:
        print(compared({path.stem: json.loads(path.read_text())["summary"] for path in arguments.compare}))
        return
    sys.path[:0] = [str(arguments.tree.resolve() / part) for part in ("", "tests")]
    rows = replayed(arguments.each, arguments.out.with_suffix(".jsonl"))
    summary = summary_of(rows)
    lines = ",\n".join(json.dumps(list(row.values())) for row in rows)
    head = json.dumps({"summary": summary, "columns": list(rows[0])})
    arguments.out.write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')
    print(compared({arguments.out.stem: summary}))


def replayed(each: int, progress: Path) -> list[Row]:
    """Returns a row for each case; those that `progress` has are not replayed again."""
    from frozen.decisions import VARIANTS, Case
    from simulated.landscape import WORKLOADS

    lines = progress.read_text().splitlines() if progress.exists() else []
    known = {row["seed"]: row for row in map(json.loads, lines)}
    variants, rows = list(VARIANTS), []
    for number in range(each * len(BUDGETS_S)):
        of, seed = number // len(BUDGETS_S), FIRST_SEED + number
        if seed not in known:
            variant = variants[(of + of // len(WORKLOADS)) % len(variants)]
            workload, objective = WORKLOADS[of % len(WORKLOADS)], OBJECTIVES[of % len(OBJECTIVES)]
            budget_s = BUDGETS_S[number % len(BUDGETS_S)]
            case = Case(workload=workload, seed=seed, budget_s=budget_s, objective=objective, variant=variant)
            append(progress, known.setdefault(seed, replay(case)))
        rows.append(known[seed])
    return rows


def replay(case: Any) -> Row:
    """Tunes once in simulated time."""
    from frozen import decisions
    from simulated.clock import SimulatedClock

    from amptune.search.pipeline import tune_with

    started_s, clock = time.perf_counter(), SimulatedClock()
    evaluator = decisions.evaluator_of(case, clock)
    with tempfile.TemporaryDirectory() as folder:
        decision = tune_with(evaluator, decisions._request(case, clock, Path(folder)), lambda _: None)
    regret = decisions._regret(case, evaluator, decision)
    truths = [decisions._truth(evaluator.landscape, one) for one in (decision.policy, decision.baseline.policy)]
    own, baseline = (decision.objective.score_of(*truth) or math.nan for truth in truths)
    return {
        **asdict(case),
        "regret": round(regret, 4) if math.isfinite(regret) else None,
        "claims": decision.policy != decision.baseline.policy,
        "gain": [round(one, 4) for one in (decision.gain.value, decision.gain.low, decision.gain.high)],
        "true_gain": round(own / baseline, 4),
        "provisional": decision.provisional,
        "trials": len(decision.trials),
        "seconds": round(clock(), 1),
        "asked": dict(Counter(kind for kind, _ in evaluator.asked)),
        "cpu_s": round(time.perf_counter() - started_s, 2),
    }


def summary_of(rows: Sequence[Row]) -> Summary:
    """Returns the figures for each budget; regrets and shares are in parts of 1, None is a share of nothing."""
    return {f"{budget_s:g}": _summary([row for row in rows if row["budget_s"] == budget_s]) for budget_s in BUDGETS_S}


def _summary(rows: Sequence[Row]) -> dict[str, float | None]:
    regrets = [row["regret"] for row in rows if row["regret"] is not None]
    claims = [row for row in rows if row["claims"]]
    true = [row for row in claims if row["true_gain"] >= row["gain"][1]]
    asked = sum((Counter(row["asked"]) for row in rows), Counter[str]())
    found = {
        "replays": len(rows),
        "mean regret": statistics.fmean(regrets),
        "median": statistics.median(regrets),
        "90 %": statistics.quantiles(regrets, n=10)[-1],
        "infinite": len(rows) - len(regrets),
        "claims": len(claims),
        "true": _share(len(true), len(claims)),
        "inside": _share(sum(row["true_gain"] <= row["gain"][2] for row in true), len(claims)),
        "confirmed and true": _share(*(sum(not row["provisional"] for row in some) for some in (true, claims))),
        "provisional": _share(sum(row["provisional"] for row in rows), len(rows)),
        **{name: statistics.fmean(row[name] for row in rows) for name in ("trials", "seconds")},
        **{f"asked to {kind}": count / len(rows) for kind, count in sorted(asked.items())},
    }
    return {name: None if value is None else round(value, 4) for name, value in found.items()}


def _share(some: int, of: int) -> float | None:
    return some / of if of else None


def compared(summaries: Mapping[str, Summary]) -> str:
    """Returns a table in Markdown: for each budget a row of each file."""
    every = [(budget, name, summary[budget]) for name, summary in summaries.items() for budget in summary]
    heads = list(dict.fromkeys(head for _, _, of in every for head in of))
    lines = [f"| s | {' | '.join(('file', *heads))} |", "|---" * (len(heads) + 2) + "|"]
    for budget, name, of in sorted(every, key=lambda one: float(one[0])):
        cells = ("-" if of.get(head) is None else f"{of[head]:.4g}" for head in heads)
        lines.append(f"| {' | '.join((budget, name, *cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
