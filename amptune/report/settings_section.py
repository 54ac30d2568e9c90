"""The page's section on settings: what each buys, and what is kept in FP32. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from amptune.policy.settings import KNOBS, Policy
from amptune.report.markup import bullets, note, section, table
from amptune.report.result_tables import ablation_table
from amptune.search.decide.study_report import StudyReport

__all__ = ["settings_of"]


def settings_of(study_report: StudyReport) -> str:
    return section(
        "settings", "What each setting buys", *_bought(study_report), "<h3>Modules and precision</h3>",
        *_kept(study_report.winner),
    )  # fmt: skip


def _bought(study_report: StudyReport) -> Iterator[str]:
    if study_report.keeps_the_baseline:
        yield note("The answer is the baseline, so there is no setting to take apart.")
        return
    if not study_report.ablation:
        yield note(
            "Not measured: no policy that lacks just one of the settings was tried. More --budget makes such "
            "comparisons."
        )
        return
    bought = ablation_table(study_report.ablation, study_report.objective)
    yield table((bought.name, *bought.headings), [(row.name, *row.figures) for row in bought.rows])
    yield note("Where settings do the same work, they gain less together than their product.")


def _kept(policy: Policy) -> Iterator[str]:
    """Yields what the policy keeps in FP32 or runs in half, each with its reason."""
    said = [words for knob in KNOBS if knob.precision == "part" for words in knob.explained(policy)]
    if said:
        yield bullets(said)
    elif policy.precision == "off":
        yield note("All modules run in FP32.")
    else:
        yield note("No module was kept in FP32: neither speed nor numerics asked for one.")
