"""Prints the results of the commands: as wide as the terminal, and elsewhere as wide as their content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from amptune.errors import visible
from amptune.report.answer import answer_of
from amptune.report.hardware_facts import hardware_in_lines
from amptune.report.important_findings import important, ranked
from amptune.report.result_tables import ablation_table, claim_table, curves_table, policies_table
from amptune.report.text_table import TextTable, wrapped
from amptune.search.decide.study_report import StudyReport, command_of, findings_of

if TYPE_CHECKING:
    from amptune.hardware.machine import Hardware
    from amptune.policy.findings import Finding
    from amptune.search.decide.decision import Decision
    from amptune.search.diagnosis import Diagnosis
    from amptune.search.gate.long_look import LongLook
    from amptune.search.verification import Verification

__all__ = [
    "print_decision",
    "print_diagnosis",
    "print_findings",
    "print_hardware",
    "print_long_look",
    "print_study_report",
    "print_verification",
]

_WINNER, _TITLE = "bold green", "bold"


def print_decision(
    decision: Decision, output: str, stream: TextIO, *, training: str | None = None, verbose: bool = False
) -> None:
    """Prints the answer in three lines; if `verbose`, the tables too.

    `training` is the line that training needs, by default that of a loop.
    """
    page = _Page(stream)
    found, *others = answer_of(decision, output, training)
    page.line(found, _TITLE if decision.verdict.keeps_the_baseline and decision.loader is None else _WINNER)
    for line in others:
        page.line(line)
    if verbose:
        page.line()
        page.table(policies_table(decision, decision.finalists, f"{decision.subject.name} on {decision.hardware.name}"))
        page.line()
        if decision.ablation:
            page.table(ablation_table(decision.ablation, decision.objective))
            page.line()
    stream.flush()  # what follows may go elsewhere


def print_findings(decision: Decision, stream: TextIO, *, artifacts: str | None = None, verbose: bool = False) -> None:
    """Prints the important findings, the most important first; all of them if `verbose`.

    Then where the `artifacts` are, the file of what was compiled.
    """
    page = _Page(stream)
    page.findings(ranked(decision.findings) if verbose else important(decision.findings))
    if artifacts is not None:
        page.bullet(f"compiled graphs are in {artifacts}; amptune.apply(…, artifacts=True) loads them")


def print_verification(found: Verification, stream: TextIO) -> None:
    """Prints claimed and measured figures side by side, then the findings: the answer and the changes."""
    page = _Page(stream)
    page.table(claim_table(found))
    page.findings(found.findings)


def print_long_look(look: LongLook, curves: str, stream: TextIO) -> None:
    """Prints the last losses of FP32 and the policy side by side, then the findings: the answer comes first."""
    page = _Page(stream)
    if look.gaps:
        page.table(curves_table(look))
    page.findings(look.findings)
    page.line(f"the curves are in {curves}")


def print_diagnosis(found: Diagnosis, stream: TextIO) -> None:
    """Prints one finding per line, the most important first."""
    page = _Page(stream)
    page.line(f"{found.subject.name} on {found.hardware.name}, {found.seconds:.0f} s", _TITLE)
    page.findings(found.findings)
    if not found.findings:
        page.line("nothing was found to be wrong")


def print_hardware(hardware: Hardware, missing: Iterable[Finding], stream: TextIO) -> None:
    """Prints the machine, one fact per line, then what its GPU lacks."""
    page = _Page(stream)
    for line in hardware_in_lines(hardware):
        page.line(line)
    page.findings(missing)


def print_study_report(study_report: StudyReport, stream: TextIO) -> None:
    """Prints the answer, the Pareto set, the number of failures, and the command that proves the answer."""
    page, record = _Page(stream), study_report.record
    page.line(f"{record.last.workload} on {record.last.hardware}, for {study_report.objective.name}", _TITLE)
    page.findings(findings_of(study_report))
    page.line()
    title = "best trade-offs of speed and memory, beside the baseline"
    page.table(policies_table(study_report, study_report.trade_offs, title, with_numerics=True))
    failures = Counter(failure.kind for _, failure in study_report.failures)
    if failures:
        words = ", ".join(f"{count} {kind}" for kind, count in failures.items())
        page.line()
        page.line(f"{len(study_report.failures)} of {len(record.trials)} trials failed: {words}")
    page.line()
    page.as_it_is(f"To measure it anew: {command_of(study_report)}")


class _Page:
    """A stream that text is printed on, line by line; only a terminal has a width."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._width = self._console.width if stream.isatty() else None

    def line(self, text: str = "", style: str = "") -> None:
        for part in text.splitlines() or [""]:
            for line in wrapped(part, self._width, hanging="  ") or [""]:
                self.as_it_is(line, style)

    def as_it_is(self, text: str, style: str = "") -> None:
        """Prints one line, however long: what may be copied from the terminal gets no line break."""
        self._console.print(Text(visible(text), style), soft_wrap=True)

    def bullet(self, text: str) -> None:
        self.line(f"• {text}")

    def findings(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.bullet(str(finding))

    def table(self, table: TextTable) -> None:
        for line in table.lines(self._width):
            self.as_it_is(line.text, _TITLE if line.is_title else _WINNER if line.wins else "")
