"""Judges repeated sittings: does the interval of one hold the ratio that another one measures? And fits the priors.

    python reports/sittings_judged.py reports/sittings/h200-1.jsonl reports/sittings/h200-2.jsonl
    python reports/sittings_judged.py --fit reports/sittings/cpu-1.jsonl reports/sittings/cpu-2.jsonl

Each sitting is judged by itself, by the model of the package; the ratio of another sitting is its plain estimate, not
shrunk. `--fit` looks for the priors of `search/table/effects.py` that give the other sittings the largest density, on
every other model, and shows them on the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scipy.stats import t as student

from amptune.measure.results.outcome import Measurement, outcome_from_dict
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import STOCK, Policy
from amptune.search.table.effects import Effect, Machine, machine_of
from amptune.search.table.model import fit
from amptune.search.table.ratio import CONFIRMED, Ratio
from amptune.search.table.row import Row

Sitting = Mapping[str, Sequence[Row]]


@dataclass(frozen=True)
class Repeat:
    """One policy beside stock PyTorch: the ratio claimed by one sitting, and what another one measured."""

    model: str
    policy: Policy
    claimed: Ratio
    measured: float

    @property
    def holds(self) -> bool:
        return self.claimed.low <= self.measured <= self.claimed.high

    @property
    def log_density(self) -> float:
        distance = math.log(self.measured / self.claimed.value) / self.claimed.deviation
        return float(student.logpdf(distance, self.claimed.freedom)) - math.log(self.claimed.deviation)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="sittings of one machine")
    parser.add_argument("--fit", action="store_true", help="also look for better priors")
    arguments = parser.parse_args()
    sittings = [sitting_of(path) for path in arguments.files]
    machine = machine_of("cpu" if any("cpu" in name for name in sittings[0]) else "cuda")
    repeats = list(repeats_of(sittings, machine))
    print(table(repeats))
    if arguments.fit:
        print(fitted(sittings, machine))
    return 0


def sitting_of(path: Path) -> Sitting:
    """The rows of each model."""
    found: dict[str, list[Row]] = defaultdict(list)
    for data in map(json.loads, path.read_text().splitlines()):
        found[data["model"]].append(
            Row(
                policy=policy_from_dict(data["policy"]),
                outcome=outcome_from_dict(data["outcome"]),
                run=path.stem,
                launch=str(data["launch"]),
                moment_s=data["moment"],
            )
        )
    return found


def repeats_of(sittings: Sequence[Sitting], machine: Machine, models: Sequence[str] | None = None) -> Iterator[Repeat]:
    """Every ordered pair of sittings, every model, every policy but stock PyTorch."""
    for first, second in itertools.permutations(sittings, 2):
        for model in models if models is not None else sorted(first.keys() & second.keys()):
            now, then = (fit(one[model], STOCK, score, machine) for one in (first, second))
            if now is None or then is None:
                continue
            for policy in now.policies:
                claimed = now.to_baseline(policy)
                if policy != STOCK and policy in then.policies and claimed is not None:
                    measured = math.exp(float(then.raw[then.policies.index(policy)]))
                    yield Repeat(model, policy, claimed, measured)


def score(measurement: Measurement) -> float:
    return measurement.samples_per_s


def table(repeats: Sequence[Repeat]) -> str:
    """The summary, and the repeats that missed their interval, as Markdown."""
    confirmed = [one for one in repeats if one.claimed.chance_above(1) >= CONFIRMED]
    cells = {
        "comparisons": str(len(repeats)),
        "ratio of the other sitting within the interval": f"{statistics.fmean(one.holds for one in repeats):.1%}",
        "± (median)": f"{statistics.median(one.claimed.half_width for one in repeats):.1%}",
        "confirmed faster": str(len(confirmed)),
        "of these slower in the other": str(sum(one.measured <= 1 for one in confirmed)),
    }
    lines = [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|", f"| {' | '.join(cells.values())} |", ""]
    missed = [one for one in repeats if not one.holds]
    lines += [
        f"- missed: {one.model}, {one.policy}: {one.claimed} claimed, {one.measured:.3f} measured" for one in missed
    ]
    return "\n".join(lines) + "\n"


def fitted(sittings: Sequence[Sitting], machine: Machine) -> str:
    """The best of a grid of priors on every other model, beside the present ones, and both on the other models."""
    models = sorted(set.intersection(*(set(one) for one in sittings)))
    learn, show = models[::2], models[1::2]
    spreads = [factor * machine.least_spread for factor in (0.5, 1, 2)]
    grid = [
        replace(
            machine, sitting=Effect(size=size, worth=worth), host=Effect(size=host, worth=worth), least_spread=spread
        )
        for size, worth, host, spread in itertools.product((0.4, 0.6, 0.8, 1.2), (2.0, 3.0, 5.0), (0.3, 1.0), spreads)
    ]
    best = max(grid, key=lambda one: density(sittings, one, learn))
    lines = []
    for name, one in (("present", machine), ("best of the grid", best)):
        lines.append(
            f"{name}: sitting {one.sitting.size} worth {one.sitting.worth}, host {one.host.size}, least spread "
            f"{one.least_spread}: density {density(sittings, one, learn):.3f} where learned, "
            f"{density(sittings, one, show):.3f} on the other models"
        )
    return "\n".join(lines)


def density(sittings: Sequence[Sitting], machine: Machine, models: Sequence[str]) -> float:
    return statistics.fmean(one.log_density for one in repeats_of(sittings, machine, models))


if __name__ == "__main__":
    sys.exit(main())
