"""Progress while tuning, always on stderr: a live display on a terminal, else a plain line per event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import TextIO

from rich.console import Console

from amptune.errors import visible
from amptune.measure.results.outcome import Failure, Measurement
from amptune.report.live_display import STAGES, LiveDisplay
from amptune.search.events import (
    ComparisonStarted,
    Compiling,
    CurveTrained,
    Event,
    Observer,
    PolicyJudged,
    SearchEnded,
    SearchStarted,
    TrialEnded,
    WorkerSaid,
    WorkloadBuilt,
)
from amptune.search.plan.budget import Budget
from amptune.search.table.gains import counted
from amptune.search.table.objective import Objective

__all__ = ["describe", "progress_for"]


@contextmanager
def progress_for(stream: TextIO, budget: Budget | None = None, *, verbose: bool = False) -> Iterator[Observer]:
    """Yields an observer that writes to `stream`: a live display on a terminal, else a plain line per event.

    With a budget the first line is there before anything is measured, and the display's clock ticks; without one, lines
    are printed on a terminal too. If `verbose`, the lines stand above the live display.
    """
    console = Console(file=stream, highlight=False)
    if budget is None or not stream.isatty() or console.is_dumb_terminal:
        if budget is not None:
            _print_line(stream, f"[{ceil(max(0.0, budget.left_s)):4d} s left] building the workload")
        yield lambda event: _print_line(stream, describe(event))
        return
    display = LiveDisplay(console, budget)
    with display.live:
        yield partial(_show, console, display, verbose=verbose)


def describe(event: Event) -> str | None:
    """Returns the event as one plain line that starts with the time left; None for events that are only shown live."""
    match event:
        case WorkloadBuilt():
            text = _built(event)
        case PolicyJudged():
            judgement = event.judgement
            verdict = judgement if judgement.passes else f"not as good as FP32: {judgement}"
            text = f"numerics of {judgement.policy}: {verdict}"
        case SearchStarted():
            remembered = f"; {event.remembered} trials remembered from {event.study}" if event.remembered else ""
            text = f"search space {event.architecture}: {event.size} policies{remembered}"
        case Compiling():
            text = f"compiling in the background: {event.policy}"
        case TrialEnded():
            text = _trial(event)
        case SearchEnded():
            text = f"search ended after {counted(event.trials, 'new trial')}: {event.because}"
        case ComparisonStarted():
            several = "1 policy" if len(event.policies) == 1 else f"{len(event.policies)} policies in turn"
            text = f"{STAGES[event.stage]}: {several}"
        case CurveTrained():
            seed = f"seed {event.seed + 1} of {event.seeds}"
            text = f"{seed}: {event.steps:,} steps under {event.policy}, the last loss is {event.last_loss:.4g}"
        case WorkerSaid():
            return f"worker {event.worker}: {event.text}"
        case _:
            return None
    return f"[{max(0.0, event.left_s):4.0f} s left] {text}"


def _print_line(stream: TextIO, line: str | None) -> None:
    """Prints without rich, which writes HTML in a notebook."""
    if line is not None:
        print(f"{visible(line)}\n", end="", file=stream, flush=True)  # in one piece: workers are told of in threads


def _show(console: Console, display: LiveDisplay, event: Event, *, verbose: bool) -> None:
    line = describe(event)
    if verbose and line is not None:
        console.print(visible(line), markup=False, soft_wrap=True)
    display.take(event)


def _built(event: WorkloadBuilt) -> str:
    subject, hardware = event.prepared.subject, event.prepared.hardware
    return f"{subject.name}: {subject.parameters:,} parameters, batch {subject.batch_size}, on {hardware.name}"


def _trial(event: TrialEnded) -> str:
    trial = event.trial
    head = f"{trial.number + 1:3d}"
    if isinstance(trial.outcome, Failure):
        return f"{head}  {trial.outcome.kind:>10}        {trial.policy}: {trial.outcome.message}"
    mark = "*" if event.best is trial else " "
    figures = f"{trial.outcome.mean_ms:9.3f} ms {_relative(event)}{_figure(trial.outcome, event.objective)}"
    early = " (ended early: far behind)" if trial.outcome.abandoned else ""
    return f"{head} {mark}{figures} {trial.policy}{early}"


def _figure(measurement: Measurement, objective: Objective) -> str:
    """Returns the memory or energy to be minimized; empty for throughput."""
    match objective.name:
        case "memory":
            return f" {measurement.peak_allocated_mib:9,.0f} MiB"
        case "energy":
            joules = measurement.energy_j_per_sample
            return "          " if joules is None else f" {joules:7.4g} J"
        case "throughput":
            return ""


def _relative(event: TrialEnded) -> str:
    baseline = event.baseline
    if baseline is None or not isinstance(baseline.outcome, Measurement) or baseline.run != event.trial.run:
        return "      "  # beside another run's it would say how the machine has changed
    return f"{event.trial.samples_per_s / baseline.outcome.samples_per_s:5.2f}×"
