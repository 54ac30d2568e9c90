"""Two studies side by side: two GPUs, two releases of PyTorch; what differs, and which policies pay for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from amptune.policy.findings import Finding
from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import Policy
from amptune.report.markup import bullets, memory, note, number, section, table, times, whole_page
from amptune.report.plot import BEYOND, Bar, bars
from amptune.report.text_table import TextRow, TextTable
from amptune.search.decide.study_report import StudyReport

__all__ = ["page_of_two", "pairs_of", "told_of_two", "two_tables"]

# A policy that is slower by this factor in one of the studies is worth a sentence, and so many of them.
WORTH_TELLING, MOST_TOLD = 1.1, 5
# Of the policies that both measured, those that are drawn.
MOST_DRAWN = 12
_HEADINGS = ("", "first", "second")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPair:
    """The speed of one policy in both studies, in samples per second."""

    policy: Policy
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """The speed in the second study over that in the first."""
        return self.second / self.first

    def as_dict(self) -> dict[str, Any]:
        speeds = [float(f"{value:.4g}") for value in (self.first, self.second)]
        return {"policy": policy_to_dict(self.policy), "samples_per_s": speeds, "ratio": float(f"{self.ratio:.4g}")}


def pairs_of(first: StudyReport, second: StudyReport) -> list[PolicyPair]:
    """Returns the policies that ran in both studies, the one that became slowest first."""
    speeds = [
        {one.policy: one.samples_per_s for one in study.verdict.contenders if one.samples_per_s}
        for study in (first, second)
    ]
    both = [PolicyPair(policy=p, first=speed, second=speeds[1][p]) for p, speed in speeds[0].items() if p in speeds[1]]
    return sorted(both, key=lambda pair: pair.ratio)


def told_of_two(first: StudyReport, second: StudyReport) -> tuple[Finding, ...]:
    """Returns findings: what differs besides what is compared, and the policies whose speed changed."""
    found = []
    lasts = first.record.last, second.record.last
    if lasts[0].workload != lasts[1].workload:
        words = f"the workloads have other names, {lasts[0].workload} and {lasts[1].workload}: compare them with care"
        found.append(Finding(code="other-workload", message=words))
    if lasts[0].batch_size != lasts[1].batch_size:
        words = f"the batch sizes differ, {lasts[0].batch_size} and {lasts[1].batch_size}; speeds are in samples"
        found.append(Finding(code="other-batch-size", message=words))
    pairs = pairs_of(first, second)
    if not pairs:
        return (*found, Finding(code="nothing-common", message="no policy ran in both studies"))
    for pair in [pair for pair in pairs if pair.ratio * WORTH_TELLING < 1][:MOST_TOLD]:
        words = f"{pair.policy} is {1 / pair.ratio:.3g} times slower in the second study"
        found.append(Finding(code="slower", message=words, figures={"ratio": pair.ratio}))
    for pair in [pair for pair in reversed(pairs) if pair.ratio > WORTH_TELLING][:MOST_TOLD]:
        words = f"{pair.policy} is {pair.ratio:.3g} times as fast in the second study"
        found.append(Finding(code="faster", message=words, figures={"ratio": pair.ratio}))
    if len(found) == 0:
        words = f"all {len(pairs)} policies that ran in both are as fast in the second, within {WORTH_TELLING - 1:.0%}"
        found.append(Finding(code="as-fast", message=words))
    return tuple(found)


def two_tables(first: StudyReport, second: StudyReport) -> tuple[TextTable, TextTable]:
    """Returns the facts of both studies, and the speeds of the policies that ran in both."""
    facts = tuple(TextRow(name=name, figures=values) for name, *values in _facts(first, second))  # type: ignore[arg-type]
    speeds = tuple(
        TextRow(name="", figures=(number(one.first), number(one.second), f"{one.ratio:.2f}×"), policy=str(one.policy))
        for one in pairs_of(first, second)
    )
    return (
        TextTable(title="two studies", headings=_HEADINGS[1:], rows=facts),
        TextTable(title="samples/s of what ran in both", headings=("first", "second", "second / first"), rows=speeds),
    )


def page_of_two(first: StudyReport, second: StudyReport) -> str:
    """Returns the page. All text is escaped."""
    pairs = pairs_of(first, second)
    title = f"{_named(first)} beside {_named(second)}"
    heading = f'<header>\n<p class="eyebrow">amptune · two studies</p>\n<h1>{escape(title)}</h1>\n</header>'
    rows = [(str(one.policy), number(one.first), number(one.second), f"{one.ratio:.2f}×") for one in pairs]
    speeds = table(["policy", "first", "second", "second / first"], rows) if rows else note("No policy ran in both.")
    return whole_page(
        title,
        [
            heading,
            section("told", "What differs", bullets(map(str, told_of_two(first, second)))),
            section("facts", "Both studies", table(_HEADINGS, _facts(first, second))),
            section("speeds", "Samples per second of what ran in both", *_bars(pairs), speeds),
        ],
    )


def _named(study_report: StudyReport) -> str:
    last = study_report.record.last
    torch = dict(last.software).get("torch")
    return f"{last.workload} on {last.hardware}" + (f", torch {torch}" if torch else "")


def _facts(first: StudyReport, second: StudyReport) -> Iterator[tuple[str, str, str]]:
    yield from zip(_NAMES, _own(first), _own(second), strict=True)
    versions = dict(first.record.last.software), dict(second.record.last.software)
    yield from ((name, versions[0].get(name, ""), versions[1].get(name, "")) for name in {**versions[0], **versions[1]})


_NAMES = (
    "workload", "hardware", "batch size", "tuned", "answer", "over the baseline", "certainty", "baseline, ms/step",
    "answer, ms/step", "answer, peak memory", "trials", "failed",
)  # fmt: skip


def _own(study_report: StudyReport) -> Sequence[str]:
    last, verdict = study_report.record.last, study_report.verdict
    kept = "the baseline: keep it" if study_report.keeps_the_baseline else str(study_report.policy)
    return (
        last.workload, last.hardware, str(last.batch_size), last.began[:10], kept, times(verdict.gain),
        verdict.confidence, number(verdict.baseline.step_ms), number(verdict.winner.step_ms),
        memory(verdict.winner.peak_memory_mib), str(len(study_report.record.trials)), str(len(study_report.failures)),
    )  # fmt: skip


def _bars(pairs: Sequence[PolicyPair]) -> Iterator[str]:
    """Yields two bars for each of the policies whose speed differs most."""
    drawn = sorted(pairs, key=lambda pair: -abs(pair.ratio - 1))[:MOST_DRAWN]
    if not drawn:
        return
    rows = []
    for pair in drawn:
        rows.append(Bar(name=str(pair.policy), end=pair.first, kind="baseline", words=f"{number(pair.first)} first"))
        words = f"{number(pair.second)} second, {pair.ratio:.2f}×"
        rows.append(Bar(name="", end=pair.second, kind="gain" if pair.ratio >= 1 else "loss", words=words))
    yield bars(rows, max(max(pair.first, pair.second) for pair in drawn) * BEYOND)
