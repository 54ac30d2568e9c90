"""The page's section on settings: a waterfall of what each buys, and the modules by precision. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from amptune.measure.results.half_effects import Sensitivity
from amptune.policy.settings import KNOBS, Fp32Rule, Policy
from amptune.report.markup import bullets, interval, note, section, times
from amptune.report.module_map import ModuleGroup, grouped, kept_by
from amptune.report.plot import Bar, bars
from amptune.search.decide.study_report import StudyReport
from amptune.search.table.ablation import variants_of
from amptune.search.table.gains import FIGURES
from amptune.search.table.ratio import Ratio

__all__ = ["settings_of"]

# A remainder below this share is rounding, and is not drawn.
REMAINDER = 0.01
# Modules are shown one by one up to this number, and by groups beyond it.
MOST_ROWS = 40


def settings_of(study_report: StudyReport, modules: Mapping[str, Sensitivity]) -> str:
    return section(
        "settings", "What each setting buys", *_waterfall(study_report), "<h3>Modules and precision</h3>",
        *_kept(study_report.policy), *_map(study_report, modules),
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


def _map(study_report: StudyReport, modules: Mapping[str, Sensitivity]) -> Iterator[str]:
    if not modules:
        yield note("Modules were not timed one by one in this study: there was nothing to exclude, or no time for it.")
        return
    layout = study_report.policy.memory_format
    name = next((one for one in modules if layout in one), next(iter(modules)))
    groups = grouped(modules[name].modules, MOST_ROWS)
    dtypes = [dtype for dtype in ("bf16", "fp16") if any(dtype in group.half_ms for group in groups)]
    risks = {dtype: _risks(study_report, dtype) for dtype in dtypes}
    heads = [
        "module", "FP32", *dtypes, *(f"{dtype}: risk" for dtype in dtypes if risks[dtype]),
    ]  # fmt: skip
    yield '<div class="map"><table><tr>' + "".join(f"<td>{escape(head)}</td>" for head in heads) + "</tr>"
    yield from (_row(group, dtypes, risks, study_report.policy.fp32_modules) for group in groups)
    yield "</table></div>"
    total = len(modules[name].modules)
    many = f" {total:,} modules are shown as {len(groups)} groups; * is any number." if total > len(groups) else ""
    yield note(
        "Milliseconds a step of each module alone, forward and backward, with its casts; green is faster than FP32, "
        f"red slower. Risk is the share of what the numerics gate allows, of the module that is worst.{many}"
    )


def _risks(study_report: StudyReport, dtype: str) -> dict[str, float]:
    """Returns how much of what is allowed a module's gradient uses, by the module's path, in the plainest policy."""
    judged = [one for one in study_report.record.judged if one.policy.precision == dtype and one.worst]
    plain = min(judged, key=lambda one: len(str(one.policy)), default=None)
    return {} if plain is None else {
        one.module: float(one.figures.get("times_allowed", 0.0)) for one in plain.worst if one.module is not None
    }  # fmt: skip


def _row(
    group: ModuleGroup, dtypes: Sequence[str], risks: Mapping[str, Mapping[str, float]], rules: Sequence[Fp32Rule]
) -> str:
    count = f" ({len(group.paths)})" if len(group.paths) > 1 else ""
    kept = " · FP32" if any(kept_by(rule, path) for rule in rules for path in group.paths) else ""
    cells = [f"<td>{escape(group.name)}{count}<b>{kept}</b></td><td>{_ms(group.fp32_ms)}</td>"]
    for dtype in dtypes:
        half = group.half_ms.get(dtype)
        if half is None or not group.fp32_ms:
            cells.append("<td></td>")
            continue
        change = half / group.fp32_ms - 1
        kind = "faster" if change < 0 else "slower"
        share = min(1, abs(change))
        cells.append(f'<td class="{kind}" style="--share:{share:.2f}">{_ms(half)} ({change:+.0%})</td>')
    for dtype in dtypes:
        if risks[dtype]:
            risk = max((risks[dtype].get(path, 0.0) for path in group.paths), default=0.0)
            shown = "" if not risk else f"{risk:.0%}" if risk < 10 else "over 1000%"
            cells.append(f'<td class="slower" style="--share:{min(1, risk):.2f}">{shown}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _ms(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
