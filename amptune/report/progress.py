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
    CurveTrained,
    Event,
    Observer,
    PolicyJudged,
    SearchEnded,
    SearchStarted,
    StepStarted,
    TrialEnded,
    WorkloadBuilt,
)
from amptune.search.plan.plan import Stage as PlanStage
from amptune.search.table.objective import Objective

__all__ = ["describe", "progress_for"]

_STAGES = {
    "comparison": "comparison",
    "verify": "the claim measured again",
}
_STEPS: dict[PlanStage, str] = {
    "build": "building the workload",
    "batch size": "looking for",
    "trial": "measuring",
    "numerics": "judging the numerics of",
    "cure": "looking for the modules to keep in FP32 under",
    "modules": "timing",
    "wait": "waiting",
    "graph": "judging the compiled graph of",
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
            text = f"compiling in the background: {event.policy}"
        case TrialEnded():
            text = _trial(event)
        case SearchEnded():
            text = f"search ended after {event.trials} new trials: {event.because}"
        case ComparisonStarted():
            text = f"{_STAGES[event.stage]}: {len(event.policies)} policies in turn, in fresh processes"
        case CurveTrained():
            seed = f"seed {event.seed + 1} of {event.seeds}"
            text = f"{seed}: {event.steps:,} steps under {event.policy}, the last loss is {event.last_loss:.4g}"
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
        case StepStarted() if event.stage in _STEPS:
            status.update(f"{_STEPS[event.stage]} {event.what} …")
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
    figures = f"{trial.outcome.mean_ms:9.3f} ms {_relative(event)}{_figure(trial.outcome, event.objective)}"
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
