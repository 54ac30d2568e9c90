"""Prints a study's answer on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.table import Table

from amptune.policy.settings import Policy
from amptune.report.terminal import console_for
from amptune.search.decide.pareto import MOST_POINTS, Point, spread_along
from amptune.search.decide.study_report import Answer, command_of, findings_of

__all__ = ["print_answer"]


def print_answer(answer: Answer, stream: TextIO) -> None:
    """Prints the answer, the Pareto set, the number of failures, and the command that proves the answer."""
    console, record = console_for(stream), answer.record
    last = record.last
    console.print(f"{last.workload} on {last.hardware}, for {answer.objective.name}", style="bold", markup=False)
    for finding in findings_of(answer):
        console.print(f"• {finding}", markup=False)
    console.print(_front(answer))
    failures = Counter(failure.kind for _, failure in answer.failures)
    if failures:
        words = ", ".join(f"{count} {kind}" for kind, count in failures.items())
        console.print(f"\n{len(answer.failures)} of {len(record.trials)} trials failed: {words}", markup=False)
    console.print(f"\nTo measure it anew: {command_of(answer)}", markup=False)


def _front(answer: Answer) -> Table:
    """Returns the Pareto set as a table, with each policy's role."""
    shown = spread_along(answer.front)
    energy = any(point.energy_j_per_sample is not None for point in shown)
    more = "" if len(shown) == len(answer.front) else f" ({MOST_POINTS} of {len(answer.front)})"
    title = f"\nwhat no policy beats in everything{more}, beside the baseline"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("", "samples/s", "peak MiB", *(("J/sample",) if energy else ()), "numerics"):
        table.add_column(heading, justify="right" if heading and heading != "numerics" else "left", no_wrap=True)
    table.add_column("policy")
    for point in _with_the_named(answer, shown):
        table.add_row(*_study_row(answer, point, energy=energy))
    return table


def _with_the_named(answer: Answer, shown: Sequence[Point]) -> Iterator[Point]:
    """Yields the points, fastest first, plus winner and baseline, which need not be in the Pareto set."""
    named = {answer.choice.policy, answer.baseline.policy}
    others = [point for point in answer.points if point.policy in named and point not in shown]
    yield from sorted([*shown, *others], key=lambda point: -point.samples_per_s)


def _study_row(answer: Answer, point: Point, *, energy: bool) -> tuple[str, ...]:
    joules = point.energy_j_per_sample
    return (
        role_of(answer, point.policy),
        f"{point.samples_per_s:,.1f}",
        f"{point.peak_memory_mib:,.0f}",
        *((("" if joules is None else f"{joules:.4g}"),) if energy else ()),
        "passed" if point.judged else "not judged",
        str(point.policy),
    )


def role_of(answer: Answer, policy: Policy) -> str:
    """Returns a policy's role in an answer, or an empty string."""
    roles = {answer.choice.policy: "answer", answer.baseline.policy: "baseline"}
    return "answer: baseline" if answer.keeps_the_baseline and policy in roles else roles.get(policy, "")
