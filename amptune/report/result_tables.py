"""The tables of the results: of a tuning, a verification, a long look and a study. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from amptune.report.markup import interval, measured, number, times
from amptune.report.text_table import TextRow, TextTable
from amptune.search.table.gains import FIGURES

if TYPE_CHECKING:
    from amptune.search.decide.conclusion import Conclusion
    from amptune.search.gate.long_look import LongLook
    from amptune.search.table.ablation import Ablated
    from amptune.search.table.contenders import Contender
    from amptune.search.table.objective import Objective
    from amptune.search.verification import Verification

__all__ = ["ablation_table", "claim_table", "curves_table", "policies_table"]


def policies_table(
    found: Conclusion, shown: Iterable[Contender], title: str, *, with_numerics: bool = False
) -> TextTable:
    """Returns policies with their roles and figures: the times of steps, or what the gate says of their numerics."""
    shown = tuple(shown)
    energy = any(contender.energy_j_per_sample is not None for contender in shown)
    used = found.objective.name != "throughput"
    return TextTable(
        title=title,
        headings=(
            *(() if with_numerics else ("ms/step", "95 %")),
            *("samples/s", "peak MiB"),
            *(("J/sample",) if energy else ()),
            "vs. baseline",
            *((found.objective.name,) if used else ()),
            *(("numerics",) if with_numerics else ()),
        ),
        rows=tuple(
            TextRow(
                name=_role(contender, found),
                figures=_figures(contender, found if with_numerics else None, energy=energy, used=used),
                policy=str(contender.policy),
                wins=contender.policy == found.winner,
            )
            for contender in shown
        ),
        note=f"{found.objective.name}: share of the baseline's." if used else "",
    )


def _role(contender: Contender, found: Conclusion) -> str:
    roles = ["winner"] if contender.policy == found.winner else []
    if contender.policy == found.baseline.policy:
        roles.append("baseline")
    elif found.amp_recipe is not None and contender.policy == found.amp_recipe.policy:
        roles.append("AMP recipe")
    return ", ".join([*roles, "too slow"] if contender.too_slow else roles)


def _figures(contender: Contender, study: Conclusion | None, *, energy: bool, used: bool) -> tuple[str, ...]:
    """Returns the figures, or the kind of failure alone, or that its trials ended early."""
    if contender.failure is not None or contender.step_ms is None:
        return ("ended early" if contender.failure is None else contender.failure.kind,)
    between, joules = contender.step_ms_ci95, contender.energy_j_per_sample
    times_ms = (number(contender.step_ms), "") if between is None else measured(contender.step_ms, *between)
    is_judged = study is not None and study.judgements.passes(contender.policy)
    return (
        *(times_ms if study is None else ()),
        number(contender.samples_per_s),
        f"{contender.peak_memory_mib:,.0f}",
        *(("" if joules is None else f"{joules:.4g}",) if energy else ()),
        times(contender.vs_baseline),
        *((f"{1 / contender.merit:.2f}×" if contender.merit else "",) if used else ()),
        *(("passed" if is_judged else "not judged",) if study is not None else ()),
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
            TextRow(name="policy, ms/step", figures=(number(claim.step_ms), number(found.policy.step_ms))),
            TextRow(name="baseline, ms/step", figures=(number(claim.baseline_ms), number(found.baseline.step_ms))),
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
