"""Scores of predictions: verdicts right, unclear ones, ranges that hold the truth, beside two simpler predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from published_rows import Row

from amptune.predict.speed_up import PAYS_FROM, Range, verdict_of

HOW = {
    "shapes": "from shapes alone",
    "same_kind": "from a GPU of the same kind",
    "same_features": "from another kind, tensor cores and TF32 alike",
    "other_features": "from another kind, these unlike",
    "other_kind": "from any other kind",
}
_OTHER = ("same_features", "other_features")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A row's prediction: `how` it was made, from which `source`, and `nearest`: that GPU's own ratio."""

    how: str
    row: Row
    source: str | None
    nearest: float | None
    weight: float
    ratio: Range

    @property
    def pays(self) -> bool:
        return self.row.ratio > PAYS_FROM

    @property
    def verdict(self) -> str:
        return verdict_of(self.ratio)

    def as_dict(self) -> dict[str, Any]:
        return {"table": self.row.table, "gpu": self.row.gpu, "workload": self.row.workload,
                "batch": self.row.batch_size, "true": self.row.ratio, "verdict": self.verdict,
                "low": round(self.ratio.low, 3), "middle": round(self.ratio.middle, 3),
                "high": round(self.ratio.high, 3)}  # fmt: skip


def scores_of(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """Returns scores by how it was predicted; `+ AMP off` with the rows in which AMP was probably off."""
    every = {
        how: [one for one in judged if one.how == how or (how == "other_kind" and one.how in _OTHER)] for how in HOW
    }
    groups = {how: [one for one in group if one.row.learned] for how, group in every.items()}
    groups |= {f"{HOW[how]}, rows with AMP probably off too": every[how] for how in ("same_kind", "other_kind")}
    return {name: _scores(group) for name, group in groups.items() if group}


def _scores(group: Sequence[Judged]) -> dict[str, Any]:
    widths = sorted(one.ratio.high / one.ratio.low for one in group)
    held = [one for one in group if one.ratio.low <= one.row.ratio <= one.ratio.high]
    decided = [one for one in group if one.verdict != "unclear"]
    return {
        "rows": round(sum(one.weight for one in group)),
        "does_not": round(sum(one.weight for one in group if not one.pays), 1),
        "right_of_decided": _balanced(decided, {id(one) for one in decided if (one.verdict == "pays") == one.pays}),
        "right_of_all": _balanced(group, {id(one) for one in decided if (one.verdict == "pays") == one.pays}),
        "unclear": _share(group, [one for one in group if one.verdict == "unclear"]),
        "unclear_balanced": _balanced(group, {id(one) for one in group if one.verdict == "unclear"}),
        "always_pays": _balanced(group, {id(one) for one in group if one.pays}),
        "nearest": _balanced(group, {id(one) for one in group if one.nearest and (one.nearest > PAYS_FROM) == one.pays})
        if group[0].nearest else None,
        "held": _share(group, held),
        "median_width": round(widths[len(widths) // 2], 3),
    }  # fmt: skip


def _share(group: Sequence[Judged], chosen: Sequence[Judged]) -> float | None:
    whole = sum(one.weight for one in group)
    return round(sum(one.weight for one in chosen) / whole, 3) if whole else None


def _balanced(group: Sequence[Judged], chosen: set[int]) -> float | None:
    """Returns the mean of the share chosen among rows that pay and among those that do not."""
    shares = []
    for pays in (True, False):
        ours = [one for one in group if one.pays == pays]
        shares.append(_share(ours, [one for one in ours if id(one) in chosen]))
    known = [share for share in shares if share is not None]
    return round(sum(known) / len(known), 3) if known else None


def in_markdown(scores: dict[str, dict[str, Any]], judged: Sequence[Judged], left: Sequence[str]) -> str:
    lines = [
        "# Predictions scored on published ratios",
        "",
        "Written by `python reports/published.py`. What is fitted is fitted without each row's GPU.",
        "Shares marked b are the mean over rows that pay and rows that do not.",
        "",
        "| predicted | rows | of them does not | right of decided, b | right of all, b | unclear | unclear, b "
        "| always pays, b | that GPU's ratio, b | held | median width |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in scores.items():
        figures = " | ".join("-" if value is None else f"{value:g}" for value in one.values())
        lines.append(f"| {HOW.get(name, name)} | {figures} |")
    lines += ["", "## Rows from shapes alone that do not pay, and cases from forums", ""]
    lines += ["| GPU | model | table | true | predicted | verdict |", "|---|---|---|---|---|---|"]
    for found in judged:
        if found.how == "shapes" and (not found.pays or found.row.table == "case"):
            ends = f"{found.ratio.low:.2f} to {found.ratio.high:.2f}"
            layout = ", channels_last" if found.row.setting.channels_last else ""
            lines.append(f"| {found.row.gpu} | {found.row.workload}{layout} | {found.row.table} | "
                         f"{found.row.ratio:.2f} | {ends} | {found.verdict} |")  # fmt: skip
    lines += ["", "## Rows left out", ""]
    lines += [f"- {line} ({times})" if times > 1 else f"- {line}" for line, times in Counter(left).items()]
    return "\n".join(lines) + "\n"
