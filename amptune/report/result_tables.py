"""The tables of the results: of a tuning, a verification, a long look and a study. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from amptune.report.markup import interval, measured, number, times
from amptune.report.text_table import TextRow, TextTable
from amptune.search.table.gains import FIGURES

if TYPE_CHECKING:
    from amptune.policy.settings import Policy
    from amptune.search.decide.decision import Decision
    from amptune.search.decide.study_report import StudyReport
    from amptune.search.gate.long_look import LongLook
    from amptune.search.table.ablation import Ablated
    from amptune.search.table.contenders import Contender
    from amptune.search.table.objective import Objective
    from amptune.search.verification import Verification

__all__ = ["ablation_table", "claim_table", "comparison_table", "curves_table", "pareto_table"]


def comparison_table(decision: Decision) -> TextTable:
    """Returns the finalists, with the figures of the comparison that supports the claim."""
    shown = _finalists(decision)
    energy = any(contender.energy_j_per_sample is not None for contender in shown)
    used = decision.objective.name != "throughput"
    return TextTable(
        title=f"{decision.subject.name} on {decision.hardware.name}",
        headings=(
            *("ms/step", "95 %", "samples/s", "peak MiB"),
            *(("J/sample",) if energy else ()),
            "vs. baseline",
            *((decision.objective.name,) if used else ()),
        ),
        rows=tuple(
            TextRow(
                name=_role(contender, decision),
                figures=_figures(contender, energy=energy, used=used),
                policy=str(contender.policy),
                wins=contender.policy == decision.verdict.winner.policy,
            )
            for contender in shown
        ),
        note=f"{decision.objective.name}: share of the baseline's." if used else "",
    )


def _finalists(decision: Decision) -> list[Contender]:
    claimed = {decision.verdict.winner.policy: decision.verdict.winner, decision.baseline.policy: decision.baseline}
    others = [contender for contender in decision.finalists if contender.policy not in claimed]
    return sorted([*claimed.values(), *others], key=lambda contender: contender.place)


def _role(contender: Contender, decision: Decision) -> str:
    roles = []
    if contender.policy == decision.verdict.winner.policy:
        roles.append("winner")
    if contender.policy == decision.baseline.policy:
        roles.append("baseline")
    elif decision.amp_recipe is not None and contender.policy == decision.amp_recipe.policy:
        roles.append("AMP recipe")
    if contender.too_slow:
        roles.append("too slow")
    return ", ".join(roles)


def _figures(contender: Contender, *, energy: bool, used: bool) -> tuple[str, ...]:
    """Returns the figures, or the kind of failure alone."""
    if contender.failure is not None or contender.step_ms is None:
        return (str(contender.failure and contender.failure.kind),)
    ratio, between = contender.vs_baseline, contender.step_ms_ci95
    step_ms = contender.step_ms
    return (
        *((number(step_ms), "") if between is None else measured(step_ms, *between)),
        number(contender.samples_per_s),
        f"{contender.peak_memory_mib:,.0f}",
        *((_joules(contender.energy_j_per_sample),) if energy else ()),
        times(ratio),
        *((f"{1 / contender.merit:.2f}×" if contender.merit else "",) if used else ()),
    )


def ablation_table(parts: Iterable[Ablated], objective: Objective) -> TextTable:
    """Returns each setting's effect on speed; for memory or energy, on the use of it, with the speed beside it."""
    plain = objective.name == "throughput"
    rows = []
    for one in parts:
        value = "" if isinstance(one.variant.value, list) else str(one.variant.value)
        buys = one.buys if plain else one.buys.inverse
        figures = (times(buys), interval(buys), *(() if plain else (times(one.speed),)))
        rows.append(TextRow(name=" ".join(filter(None, (one.variant.setting, value))), figures=figures))
    return TextTable(
        title="what each setting buys",
        name="setting",
        headings=(f"{FIGURES[objective.name]} with it / without", "95 %", *(() if plain else ("speed",))),
        rows=tuple(rows),
    )


def claim_table(found: Verification) -> TextTable:
    """Returns claimed and measured figures side by side."""
    now, claim = found.speedup, found.claim
    return TextTable(
        title=f"on {found.hardware.name}, {found.seconds:.0f} s",
        headings=("claimed", "measured"),
        rows=(
            TextRow(name="policy, ms/step", figures=(_ms(claim.step_ms), _ms(found.policy.step_ms))),
            TextRow(name="baseline, ms/step", figures=(_ms(claim.baseline_ms), _ms(found.baseline.step_ms))),
            TextRow(
                name="speed-up",
                figures=(
                    "" if claim.speedup is None else f"{claim.speedup:.3g}×",
                    "failed" if now is None else str(now),
                ),
            ),
        ),
    )


def curves_table(look: LongLook) -> TextTable:
    """Returns the last losses of FP32 and the policy side by side."""
    rows = (
        TextRow(name=gap.what, figures=(f"{gap.fp32:.4g}", f"±{gap.spread:.2g}", f"{gap.policy:.4g}"))
        for gap in look.shown
    )
    return TextTable(
        title=f"{look.name} on {look.hardware.name}, {look.seconds:.0f} s",
        headings=("FP32", "between seeds", "policy"),
        rows=tuple(rows),
    )


def pareto_table(study_report: StudyReport) -> TextTable:
    """Returns the Pareto set, with each policy's role."""
    shown = study_report.front
    energy = any(point.energy_j_per_sample is not None for point in shown)
    return TextTable(
        title="best trade-offs of speed and memory, beside the baseline",
        headings=("samples/s", "peak MiB", *(("J/sample",) if energy else ()), "numerics"),
        rows=tuple(
            TextRow(
                name=_role_in_study(study_report, point.policy),
                figures=(
                    number(point.samples_per_s),
                    f"{point.peak_memory_mib:,.0f}",
                    *((_joules(point.energy_j_per_sample),) if energy else ()),
                    "passed" if study_report.judgements.passes(point.policy) else "not judged",
                ),
                policy=str(point.policy),
                wins=point.policy == study_report.winner,
            )
            for point in _with_the_named(study_report, shown)
        ),
    )


def _with_the_named(study_report: StudyReport, shown: Sequence[Contender]) -> Iterator[Contender]:
    """Yields the points, fastest first, plus winner and baseline, which need not be in the Pareto set."""
    named = {study_report.winner, study_report.baseline.policy}
    others = [point for point in study_report.points if point.policy in named and point not in shown]
    yield from sorted([*shown, *others], key=lambda point: -(point.samples_per_s or 0.0))


def _role_in_study(study_report: StudyReport, policy: Policy) -> str:
    roles = {study_report.winner: "answer", study_report.baseline.policy: "baseline"}
    return "answer: baseline" if study_report.keeps_the_baseline and policy in roles else roles.get(policy, "")


def _ms(value: float | None) -> str:
    return number(value)


def _joules(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
