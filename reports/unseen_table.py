"""The files that `unseen.py` writes, and a table that says which of the asked figures are met."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from json_lines import append  # beside this program
from unseen_models import MODELS, WITH_GRID

from amptune.policy.serialization import policy_from_dict
from amptune.search.table.ratio import Ratio

# The fastest of the grid are trained beside the rest.
FASTEST = 3
# The step that pytorch-autotune makes itself, and the policy nearest to its choice: the faster one counts.
CONTENDERS = {
    "stock": ("stock",),
    "recipe": ("amp bf16", "amp fp16"),
    "pytorch-autotune": ("pytorch-autotune", "its own step"),
    "grid": tuple(f"grid {place}" for place in range(1, FASTEST + 1)),
}

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A speed asked of amptune with a budget, over a contender's: on each model, and as the geometric mean."""

    budget_s: float
    over: str
    each: float = 0.0
    mean: float | None = None
    models: Sequence[str] = tuple(MODELS)


FIGURES = (
    Figure(budget_s=120.0, over="pytorch-autotune", each=0.97, mean=1.25),
    Figure(budget_s=120.0, over="stock", each=1.0),
    Figure(budget_s=120.0, over="grid", each=1 / 1.03, models=WITH_GRID),
    Figure(budget_s=60.0, over="recipe", mean=1.4),
    Figure(budget_s=60.0, over="pytorch-autotune", mean=1.0),
)


class Evidence:
    """A model's file: a line for each thing that was done, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, list[Line]] = (0, [])

    @property
    def model(self) -> str:
        return self._path.stem

    @property
    def _lines(self) -> list[Line]:
        """All whole lines, read again if there are more: other processes write them too."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size != self._read[0]:
            text = self._path.read_text()
            self._read = (size, [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()])
        return self._read[1]

    def add(self, what: str, line: Mapping[str, Any]) -> None:
        append(self._path, {"what": what, "host": host(), **line})

    def of(self, what: str, budget_s: float | None = None) -> list[Line]:
        found = [line for line in self._lines if line["what"] == what]
        return [line for line in found if budget_s is None or line["budget_s"] == budget_s]


def host() -> str:
    """Returns a word for this start of this machine: rows with the same word were measured on the same host."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text()[:8] if path.exists() else ""


def ran(line: Line) -> bool:
    return line["failure"] is None and bool(line["ms"])


def mean_ms(line: Line) -> float:
    """Returns the mean time of a step: of blocks of given numbers of steps all count, of others the geometric mean."""
    if line.get("block_steps") is None:
        return statistics.geometric_mean(line["ms"])
    total_ms: float = sum(ms * steps for ms, steps in zip(line["ms"], line["steps"], strict=True))
    return total_ms / sum(line["steps"])


def times_of(evidence: Evidence, budget_s: float) -> dict[str, dict[int, float]]:
    """Returns ms a step by name and launch; "amptune" is its policy of this budget.

    Who failed in any launch is left out. In older files a launch is of one budget.
    """
    lines = [line for line in evidence.of("launch") if line.get("budget_s", budget_s) == budget_s]
    failed = {name for line in lines if not ran(line) for name in line["names"]}
    times: dict[str, dict[int, float]] = {}
    for line in lines:
        for name in set(line["names"]) - failed:
            own = "amptune" if name == f"amptune {budget_s:g}" else name
            times.setdefault(own, {})[line["launch"]] = mean_ms(line)
    return times


def fastest(times: Mapping[str, Mapping[int, float]], names: Sequence[str]) -> str | None:
    alive = [name for name in names if name in times]
    return min(alive, key=lambda name: statistics.geometric_mean(times[name].values()), default=None)


def speed_over(evidence: Evidence, budget_s: float, over: str) -> Ratio | None:
    """Returns amptune's speed over the faster of a contender's: the launches' median, with Student's t over them.

    Returns None if there is nothing to compare.
    """
    times = times_of(evidence, budget_s)
    other = fastest(times, CONTENDERS[over])
    if other is None or "amptune" not in times:
        return None
    own, theirs = times["amptune"], times[other]
    logs = [math.log(theirs[launch] / own[launch]) for launch in own.keys() & theirs.keys()]
    few = len(logs) < 2
    deviation = math.inf if few else statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio.of_log(statistics.median(logs), deviation, freedom=max(1, len(logs) - 1), launches=len(logs))


def table(evidences: Sequence[Evidence]) -> str:
    """The evidence as Markdown: a table for each budget, then which figures are met."""
    budgets_s = sorted({line["budget_s"] for one in evidences for line in one.of("amptune")}, reverse=True)
    parts = ["\n".join(_rows(evidences, budget_s)) for budget_s in budgets_s]
    return "\n\n".join([*parts, "\n".join(verdict(figure, evidences) for figure in FIGURES)])


def _rows(evidences: Sequence[Evidence], budget_s: float) -> Iterator[str]:
    heads = [f"{budget_s:g} s", *CONTENDERS, "amptune", *(f"over {name}" for name in CONTENDERS), "claimed"]
    heads += ["took, pytorch-autotune took", "policy"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    asked = [one for one in evidences if one.of("amptune", budget_s)]
    for one in asked:
        times = times_of(one, budget_s)
        best = [fastest(times, names) for names in (*CONTENDERS.values(), ("amptune",))]
        ms = [f"{statistics.geometric_mean(times[name].values()):.3g}" if name else "-" for name in best]
        own, theirs = one.of("amptune", budget_s)[-1], next(iter(one.of("pytorch-autotune")), None)
        took = f"{own['seconds']:.0f} s, " + (f"{theirs['seconds']:.0f} s" if theirs else "-")
        policy = str(policy_from_dict(own["policy"])) if "policy" in own else own["failure"]
        failure = f"; pytorch-autotune: {theirs['failure']}" if theirs and theirs["failure"] else ""
        ratios = [in_words(speed_over(one, budget_s, over)) for over in CONTENDERS]
        cells = [one.model, *ms, *ratios, _claimed(own.get("speedup")), took, policy + failure]
        yield f"| {' | '.join(cells)} |"
    means = [_mean([speed_over(one, budget_s, over) for one in asked]) for over in CONTENDERS]
    shown = [f"{mean:.3f}" if mean else "-" for mean in means]
    yield f"| {' | '.join(['**geometric mean**', *[''] * (len(CONTENDERS) + 1), *shown, '', '', ''])} |"


def _claimed(speedup: Sequence[float | None] | None) -> str:
    known = [one for one in speedup or () if one is not None]
    return "{:.2f} [{:.2f}, {:.2f}]".format(*known) if len(known) == 3 else "-"


def verdict(figure: Figure, evidences: Sequence[Evidence]) -> str:
    """Returns a line that says whether a figure is met, and by which models not."""
    asked = [one for one in evidences if one.model in figure.models and one.of("amptune", figure.budget_s)]
    ratios = {one.model: speed_over(one, figure.budget_s, figure.over) for one in asked}
    known = {model: ratio for model, ratio in ratios.items() if ratio is not None}
    below = [f"{model} {in_words(ratio)}" for model, ratio in known.items() if ratio.value < figure.each]
    unanswered = [one.model for one in asked if one.of("launch") and "amptune" not in times_of(one, figure.budget_s)]
    text = f"- {figure.budget_s:g} s, over {figure.over}, {len(known)} of {len(figure.models)}"
    if figure.each:
        text += f"; each ≥ {figure.each:.3f}: {', '.join(below) or ('met' if known else 'open')}"
    text += f"; without an answer: {', '.join(unanswered)}" if unanswered else ""
    mean = _mean(list(known.values()))
    if known and mean:
        lowest = min(known, key=lambda model: known[model].value)
        text += f"; worst {lowest} {in_words(known[lowest])}; geometric mean {mean:.3f}"
    if figure.mean is not None and mean:
        text += f" ≥ {figure.mean:.3f}: {'met' if mean >= figure.mean else 'missed'}"
    return text


def _mean(ratios: Sequence[Ratio | None]) -> float | None:
    values = [ratio.value for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(values) if values else None


def in_words(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    interval = "" if math.isinf(ratio.high) else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
    return f"{ratio.value:.3f}{interval}"
