"""Progress while tuning, always on stderr: one live line on a terminal, else a plain line per event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.status import Status

from amptune.measure.results.outcome import Failure, Measurement
from amptune.search.events import (
    ComparisonStarted,
    Compiling,
    ContenderMeasured,
    Event,
    Groundwork,
    GroundworkStarted,
    Observer,
    PolicyJudged,
    SearchEnded,
    SearchStarted,
    TrialEnded,
    TrialStarted,
    WorkloadBuilt,
)
from amptune.search.table.objective import Objective

__all__ = ["describe", "progress_for"]

_STAGES = {
    "comparison": "comparison",
    "verify": "the claim measured again",
}
_GROUNDWORK: dict[Groundwork, str] = {
    "modules": "timing modules by themselves",
    "numerics": "judging the numerics of each precision",
    "batch-size": "looking for the largest batch",
}


@contextmanager
def progress_for(stream: TextIO) -> Iterator[Observer]:
    """Yields an observer that writes to `stream`: live on a terminal, else plain lines."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda event: _print_line(console, event)
        return
    with console.status("building the workload …") as status:
        yield lambda event: _show(console, status, event)


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
            text = f"compiling {len(event.policies)} graphs beside one another"
        case TrialEnded():
            text = _trial(event)
        case SearchEnded():
            text = f"search ended after {event.trials} new trials: {event.because}"
        case ComparisonStarted():
            text = f"{_STAGES[event.stage]}: {len(event.policies)} policies in turn, in fresh processes"
        case _:
            return None
    return f"[{max(0.0, event.left_s):4.0f} s left] {text}"


def _print_line(console: Console, event: Event) -> None:
    line = describe(event)
    if line is not None:
        console.print(line, markup=False)


def _show(console: Console, status: Status, event: Event) -> None:
    _print_line(console, event)
    match event:
        case GroundworkStarted():
            status.update(f"{_GROUNDWORK[event.groundwork]} …")
        case Compiling():
            status.update(f"compiling: {'; '.join(map(str, event.policies))}")
        case TrialStarted():
            status.update(f"measuring: {event.policy}")
        case ContenderMeasured():
            status.update(f"{_STAGES[event.stage]}, launch {event.launch + 1}: {event.policy}")
        case _:
            pass


def _built(event: WorkloadBuilt) -> str:
    subject, hardware = event.prepared.subject, event.prepared.hardware
    return f"{subject.name}: {subject.parameters:,} parameters, batch {subject.batch_size}, on {hardware.name}"


def _trial(event: TrialEnded) -> str:
    trial = event.trial
    head = f"{trial.number + 1:3d}"
    if isinstance(trial.outcome, Failure):
        return f"{head}  {trial.outcome.kind:>10}        {trial.policy}: {trial.outcome.message}"
    mark = "*" if event.best is trial else " "
    figures = f"{trial.outcome.median_ms:9.3f} ms {_relative(event)}{_figure(trial.outcome, event.objective)}"
    return f"{head} {mark}{figures} {trial.policy}"


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
    if baseline is None or not isinstance(baseline.outcome, Measurement):
        return "      "
    return f"{event.trial.samples_per_s / baseline.samples_per_s:5.2f}×"
