"""How many questions the search for culprits asks, where the culprits are known.

    python reports/group_testing.py --draws 1000 --out reports/group_testing.json

Each draw hides d culprits among N modules, all sets of d equally likely; a set of modules cures where it holds all d.
Held against the bound 1.5 × d·log2(N/d) + d, the question about all modules included. Writes OUT, one row for each
N and d, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from amptune.search.gate.repair import smallest_cure

SIZES = (64, 256, 1024)
CULPRITS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The questions of many draws; `least` is log2 of the number of sets, what no method's mean can be below."""

    modules: int
    culprits: int
    draws: int
    mean: float
    maximum: int
    bound: float
    within_bound: float
    least: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=1000, help="for each N and d")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = list(measured(arguments.draws, arguments.seed))
    data = {
        "schema": "amptune.group_testing/1",
        "command": " ".join(["python", *sys.argv]),
        "rows": [asdict(row) for row in rows],
    }
    arguments.out.write_text(json.dumps(data, indent=1) + os.linesep)
    print(table(rows))
    return 0


def measured(draws: int, seed: int) -> Iterator[Row]:
    for modules, culprits in product(SIZES, CULPRITS):
        rng = random.Random(f"{seed} {modules} {culprits}")  # noqa: S311  # a simulation
        asked = [questions(modules, rng.sample(range(modules), culprits)) for _ in range(draws)]
        bound = 1.5 * culprits * math.log2(modules / culprits) + culprits
        yield Row(
            modules=modules,
            culprits=culprits,
            draws=draws,
            mean=round(statistics.fmean(asked), 2),
            maximum=max(asked),
            bound=round(bound, 2),
            within_bound=statistics.fmean(number <= bound for number in asked),
            least=round(math.log2(math.comb(modules, culprits)), 2),
        )


def questions(modules: int, culprits: Sequence[int]) -> int:
    """Raises `RuntimeError` where the answer is wrong."""
    units = [str(number) for number in range(modules)]
    hidden = {units[number] for number in culprits}
    asked = 0

    def cures(kept: Sequence[str]) -> bool:
        nonlocal asked
        asked += 1
        return hidden.issubset(kept)

    if set(smallest_cure(units, cures) or ()) != hidden:
        raise RuntimeError(f"of {modules} modules, not {sorted(hidden)} were found")
    return asked


def table(rows: Sequence[Row]) -> str:
    heads = ("modules", "culprits", "mean", "maximum", "bound", "within the bound", "least possible mean")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = (
            f"{row.modules}", f"{row.culprits}", f"{row.mean:.1f}", f"{row.maximum}", f"{row.bound:.1f}",
            f"{100 * row.within_bound:.1f} %", f"{row.least:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
