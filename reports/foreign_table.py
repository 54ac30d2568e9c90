"""The plans of `foreign.py`, the files that it writes, and a table that says which of the asked figures are met."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from json_lines import append  # beside this program

from amptune.policy.serialization import policy_from_dict
from amptune.search.table.ratio import Ratio

# Targets in foreign_models.py, those first whose tunings took longest.
MODELS = (
    "swin_t", "efficientnet_v2_s", "t5_base", "convnext_tiny", "vit_small_patch16_224", "regnet_y_3_2gf", "r3d_18",
    "llama_150m",
)  # fmt: skip
# Targets in unruly_models.py.
UNRULY = (
    "layers_dropped", "host_masks", "changing_lengths", "experts_by_data", "early_exit", "loss_read", "growing_images",
    "custom_autograd",
)  # fmt: skip
WITH_GRID = ("t5_base", "swin_t", "convnext_tiny", "llama_150m")
# Those that amptune was developed with: bundled targets, and those in first_models.py.
BUNDLED = ("resnet50", "bert_base")
FIRST = (*BUNDLED, "conv1", "mlp3", "resnet18", "vgg16", "densenet161", "seresnext50", "gpt2")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """(budget, models) in order, the tunings of each, and whether pytorch-autotune tunes too.

    With `steps`, all arms train by blocks of that many steps, which all count.
    """

    jobs: tuple[tuple[float, tuple[str, ...]], ...]
    tunings: int = 1
    autotune: bool = False
    steps: int | None = None


PLANS = {
    "foreign": Plan(jobs=((120.0, MODELS), (60.0, MODELS), (300.0, WITH_GRID)), autotune=True),
    "first": Plan(jobs=((120.0, FIRST),)),
    "unruly": Plan(jobs=((120.0, UNRULY), (60.0, UNRULY)), tunings=3, steps=50),
}
# The fastest of the grid are trained beside the rest.
FASTEST = 3

CONTENDERS = {
    "stock": ("stock",),
    "recipe": ("amp bf16", "amp fp16"),
    "pytorch-autotune": ("pytorch-autotune", "its own step"),
    "grid": tuple(f"grid {place}" for place in range(1, FASTEST + 1)),
    "reports": ("reports",),
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A speed asked of amptune with a budget, over a contender's: on each model, and as the geometric mean."""

    budget_s: float
    over: str
    each: float
    mean: float | None = None
    plan: str = "foreign"

    @property
    def models(self) -> tuple[str, ...]:
        return next(models for budget_s, models in PLANS[self.plan].jobs if budget_s == self.budget_s)


FIGURES = (
    Figure(budget_s=60.0, over="stock", each=1.0),
    Figure(budget_s=60.0, over="recipe", each=1.0, mean=1.4),
    Figure(budget_s=120.0, over="pytorch-autotune", each=0.97, mean=1.2),
    Figure(budget_s=300.0, over="pytorch-autotune", each=0.97, mean=1.25),
    Figure(budget_s=300.0, over="grid", each=1 / 1.03),
    Figure(budget_s=120.0, over="reports", each=1 / 1.03, plan="first"),
)

Line = dict[str, Any]


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

    def autotune(self, budget_s: float) -> Line | None:
        """Returns what pytorch-autotune found with this budget, or with another in less time than this one."""
        serving = [
            line
            for line in self.of("pytorch-autotune")
            if line["budget_s"] == budget_s or line.get("search_s", math.inf) <= budget_s
        ]
        return serving[-1] if serving else None

    @property
    def budgets_s(self) -> list[float]:
        return sorted({line["budget_s"] for line in self.of("amptune")})


def host() -> str:
    """Returns a word for this start of this machine: rows with the same word were measured on the same host."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text()[:8] if path.exists() else ""


def ran(line: Line) -> bool:
    return line["failure"] is None and bool(line["ms"])


def mean_ms(line: Line) -> float:
    """Returns the mean time of a step: of blocks of given numbers of steps all count, of others the geometric mean."""
    if not is_long(line):
        return statistics.geometric_mean(line["ms"])
    total_ms: float = sum(ms * steps for ms, steps in zip(line["ms"], line["steps"], strict=True))
    return total_ms / sum(line["steps"])


def is_long(line: Line) -> bool:
    return line.get("block_steps") is not None


def name_of(tuning: Line) -> str:
    number = tuning.get("tuning", 0)
    return f"amptune {number + 1}" if number else "amptune"


def times_of(evidence: Evidence, budget_s: float) -> dict[str, dict[int, float]]:
    """Returns ms a step by name and launch: the geometric mean over blocks. Who failed in any launch is left out."""
    lines = evidence.of("launch", budget_s)
    failed = {name for line in lines if not ran(line) for name in line["names"]}
    times: dict[str, dict[int, float]] = {}
    for line in lines:
        for name in set(line["names"]) - failed:
            times.setdefault(name, {})[line["launch"]] = mean_ms(line)
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
    parts = [
        _table_of([e for e in evidences if budget_s in e.budgets_s and (e.model in FIRST) == first], budget_s)
        for budget_s in sorted({budget_s for evidence in evidences for budget_s in evidence.budgets_s})
        for first in (False, True)
    ]
    verdicts = [verdict(figure, [e for e in evidences if figure.budget_s in e.budgets_s]) for figure in FIGURES]
    return "\n\n".join([*filter(None, parts), "\n".join(verdicts)])


def _table_of(evidences: Sequence[Evidence], budget_s: float) -> str:
    if not evidences:
        return ""
    names = ("stock", "amp bf16", "amp fp16", "pytorch-autotune", "its own step", "grid", "amptune")
    heads = (
        f"{budget_s:g} s",
        *names,
        *(f"vs. {over}" for over in CONTENDERS),
        "took, pytorch-autotune took",
        "policy",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for evidence in evidences:
        times = times_of(evidence, budget_s)
        best = [fastest(times, CONTENDERS.get(name, (name,)) if name == "grid" else (name,)) for name in names]
        ms = [f"{statistics.geometric_mean(times[name].values()):.3f}" if name else "-" for name in best]
        ratios = [in_words(speed_over(evidence, budget_s, over)) for over in CONTENDERS]
        own, theirs = evidence.of("amptune", budget_s)[-1], evidence.autotune(budget_s)
        took = f"{own['seconds']:.0f} s, " + (f"{theirs['seconds']:.0f} s" if theirs else "-")
        policy = str(policy_from_dict(own["policy"])) if "policy" in own else own["failure"]
        failure = f"; pytorch-autotune: {theirs['failure']}" if theirs and theirs["failure"] else ""
        lines.append(f"| {' | '.join([evidence.model, *ms, *ratios, took, policy + failure])} |")
    means = [_mean([speed_over(evidence, budget_s, over) for evidence in evidences]) for over in CONTENDERS]
    cells = ["**geometric mean**", *[""] * len(names), *(f"{mean:.3f}" if mean else "-" for mean in means), "", ""]
    return "\n".join([*lines, f"| {' | '.join(cells)} |"])


def verdict(figure: Figure, evidences: Sequence[Evidence]) -> str:
    """Returns a line that says whether a figure is met; a model misses it only if its whole interval is below."""
    asked = {evidence.model: evidence for evidence in evidences if evidence.model in figure.models}
    ratios = {model: speed_over(one, figure.budget_s, figure.over) for model, one in asked.items()}
    known = {model: ratio for model, ratio in ratios.items() if ratio is not None}
    missed = [f"{model} {in_words(ratio)}" for model, ratio in known.items() if ratio.high < figure.each]
    missed += [f"{model} without an answer" for model, one in asked.items() if _without_answer(one, figure.budget_s)]
    perhaps = [
        f"{model} {in_words(ratio)}" for model, ratio in known.items() if ratio.value < figure.each <= ratio.high
    ]
    told = {"missed": missed, "undecided": perhaps}
    each = "; ".join(f"{word}: {', '.join(names)}" for word, names in told.items() if names)
    each = each or ("met" if known else "open")
    count = f"{len(known)} of {len(figure.models)}"
    text = f"- {figure.budget_s:g} s, over {figure.over}, {count}: each ≥ {figure.each:.3f}: {each}"
    mean = _mean(list(known.values()))
    if figure.mean is None or mean is None:
        return text
    return f"{text}; geometric mean ≥ {figure.mean:.3f}: {'met' if mean >= figure.mean else 'missed'}, {mean:.3f}"


def _without_answer(evidence: Evidence, budget_s: float) -> bool:
    """Returns True if amptune gave no policy, or its policy failed in a launch."""
    no_policy = any("policy" not in line for line in evidence.of("amptune", budget_s))
    launched = bool(evidence.of("launch", budget_s))
    return no_policy or (launched and "amptune" not in times_of(evidence, budget_s))


def _mean(ratios: Sequence[Ratio | None]) -> float | None:
    values = [ratio.value for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(values) if values else None


def in_words(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    interval = "" if math.isinf(ratio.high) else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
    return f"{ratio.value:.3f}{interval}"
