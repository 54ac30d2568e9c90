"""The page's section on settings: a waterfall of what each buys, and what is kept in FP32. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from amptune.policy.settings import KNOBS, Policy
from amptune.report.markup import bullets, interval, note, section, times
from amptune.report.plot import Bar, bars
from amptune.search.decide.study_report import StudyReport
from amptune.search.table.ablation import variants_of
from amptune.search.table.gains import FIGURES
from amptune.search.table.ratio import Ratio

__all__ = ["settings_of"]

# A remainder below this share is rounding, and is not drawn.
REMAINDER = 0.01


def settings_of(study_report: StudyReport) -> str:
    return section(
        "settings", "What each setting buys", *_waterfall(study_report), "<h3>Modules and precision</h3>",
        *_kept(study_report.policy),
    )  # fmt: skip


def _waterfall(study_report: StudyReport) -> Iterator[str]:
    if study_report.keeps_the_baseline:
        yield note("The answer is the baseline, so there is no setting to take apart.")
        return
    if not study_report.ablation:
        yield note(
            "Not measured: no policy that lacks just one of the settings was tried. More --budget makes such "
            "comparisons."
        )
        return
    yield bars(*_steps(study_report))
    objective = study_report.objective
    words = "" if objective.name == "throughput" else f" Gains are in {FIGURES[objective.name]}."
    yield note(
        "Each figure is the policy with the setting over the policy without it, with its 95 % interval; the scale is "
        f"logarithmic, so equal factors have equal lengths. Where settings do the same work, they gain less together "
        f"than their product.{words}"
    )


def _steps(study_report: StudyReport) -> tuple[list[Bar], float]:
    """Returns the bars, from 1 × to the whole gain, and the end of their scale; positions are logarithms."""
    gain = study_report.verdict.gain
    parts = sorted(study_report.ablation, key=lambda one: -one.buys.value)
    whole, at = math.log(gain.value), 0.0
    drawn: list[tuple[str, float, float, str, Ratio | None]] = []
    for one in parts:
        log = math.log(one.buys.value)
        kind = "gain" if log >= 0 else "loss"
        value = "" if isinstance(one.variant.value, list | bool) else f" {one.variant.value}"
        drawn.append((one.variant.setting.replace("_", " ") + value, at, at + log, kind, one.buys))
        at += log
    if abs(whole - at) > REMAINDER:
        drawn.append((_rest(study_report), at, whole, "rest", None))
    drawn.append(("all together", 0.0, whole, "winner", gain))
    low = min(0.0, *(min(start, end) for _, start, end, _, _ in drawn))
    high = max(max(start, end) for _, start, end, _, _ in drawn) * 1.05 or 1.0
    found = []
    for name, start, end, kind, ratio in drawn:
        known = ratio is not None and ratio.low > 0 and not math.isinf(ratio.high) and ratio.low != ratio.high
        between = (
            (start + math.log(ratio.low) - low, min(high, start + math.log(ratio.high)) - low)
            if known and ratio is not None
            else None
        )
        factor = math.exp(end - start)
        words = f"{factor:.2f}×" if ratio is None else f"{times(ratio)} [{interval(ratio)}]" if known else times(ratio)
        found.append(Bar(name=name, start=start - low, end=end - low, kind=kind, words=words, between=between))
    return found, high - low


def _rest(study_report: StudyReport) -> str:
    """Returns what the rest of the gain is from: settings whose variant was not measured, or that settings overlap."""
    measured = {one.variant.setting for one in study_report.ablation}
    missing = [one.setting for one in variants_of(study_report.policy) if one.setting not in measured]
    return f"not measured alone: {', '.join(missing)}".replace("_", " ") if missing else "overlap of the settings"


def _kept(policy: Policy) -> Iterator[str]:
    """Yields what the policy keeps in FP32 or runs in half, each with its reason."""
    said = [words for knob in KNOBS if knob.precision == "part" for words in knob.explained(policy)]
    if said:
        yield bullets(said)
    elif policy.precision == "off":
        yield note("All modules run in FP32.")
    else:
        yield note("No module was kept in FP32: neither speed nor numerics asked for one.")
