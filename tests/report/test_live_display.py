"""What a terminal shows while amptune measures, and what is printed where there is none."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from measurements import took
from simulated.clock import SimulatedClock
from terminals import Terminal

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, amp_recipe
from amptune.report.live_display import LiveDisplay, Standing, standing_after
from amptune.report.progress import progress_for
from amptune.search.events import ContenderMeasured, Event, JobStarted, SearchEnded, TrialEnded, WorkerSaid
from amptune.search.job import Job
from amptune.search.plan.budget import Budget
from amptune.search.table.objective import Objective
from amptune.search.table.trial import Trial

BASELINE = Trial(number=0, policy=STOCK, outcome=took(10.0, 1000.0), seconds=1.0)
FAST = Trial(number=1, policy=amp_recipe("bf16"), outcome=took(5.0, 700.0), seconds=1.0)
FAILED = Trial(number=2, policy=amp_recipe("fp16"), outcome=Failure(kind="oom", message="no memory"), seconds=1.0)


def ended(trial: Trial, best: Trial, objective: str = "throughput") -> Event:
    return TrialEnded(trial=trial, best=best, baseline=BASELINE.row, left_s=9.0, objective=Objective(objective))  # type: ignore[arg-type]


def after(*events: Event) -> Standing:
    standing = Standing()
    for event in events:
        standing = standing_after(standing, event)
    return standing


def test_trials_are_counted_the_best_is_held_against_the_baseline_and_what_is_tried_is_shown() -> None:
    standing = after(ended(BASELINE, BASELINE), ended(FAST, FAST), ended(FAILED, FAST))
    assert standing.trials == "3 trials, 1 failed"
    assert standing.leading == "best trial so far: bf16"
    assert after(ended(BASELINE, BASELINE)).leading == "best trial so far: the baseline"
    assert Standing().leading == Standing().trials == ""
    trying = JobStarted(job=Job(kind="trial", policies=(amp_recipe("bf16"),), seconds=1.0, limit_s=9.0))
    assert after(trying).doing == "measuring bf16"
    compared = ContenderMeasured(stage="comparison", launch=1, policy=FAST.policy, outcome=FAST.outcome)
    assert after(trying, compared).doing == "comparison, launch 2: bf16"


def test_the_last_line_of_each_other_worker_is_shown_and_each_line_where_there_is_no_terminal() -> None:
    told = [(2, "building"), (3, "fp16"), (2, "bf16")]
    lines = [WorkerSaid(worker=worker, text=text) for worker, text in told]
    assert after(*lines).others == {2: "bf16", 3: "fp16"}
    stream = io.StringIO()
    with progress_for(stream) as observer:
        for line in lines:
            observer(line)
    assert stream.getvalue() == "worker 2: building\nworker 3: fp16\nworker 2: bf16\n"


def test_the_clock_ticks_without_an_event_and_counts_from_the_whole_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    clock, terminal = SimulatedClock(), Terminal(monkeypatch, 80)
    console = Console(file=terminal, force_terminal=True)
    display = LiveDisplay(console, Budget(seconds=300.0, started=clock(), clock=clock))
    display.standing = replace(display.standing, doing=f"measuring {'very long ' * 20}")
    for passed_s in (0.0, 42.4, 1000.0):
        clock.advance(passed_s)
        console.print(display)
    assert re.findall(r"(\d+) of 300 s left", terminal.getvalue()) == ["300", "258", "0"]
    assert len(terminal.getvalue().splitlines()) == 6  # what is too long does not wrap


@pytest.mark.parametrize("verbose", [False, True])
def test_a_terminal_shows_the_display_and_lines_only_if_they_are_asked_for(
    verbose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch, 80, term="xterm")
    with progress_for(terminal, Budget(seconds=60.0), verbose=verbose) as observer:
        observer(ended(FAST, FAST))
        observer(JobStarted(job=Job(kind="trial", policies=(amp_recipe("fp16"),), seconds=1.0, limit_s=9.0)))
    assert "1 trial" in terminal.getvalue()
    assert "measuring fp16" in terminal.getvalue()
    assert ("5.000 ms" in terminal.getvalue()) is verbose


def test_elsewhere_the_first_line_has_the_whole_budget_and_each_event_has_a_line_without_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    clock = SimulatedClock()
    stop = SearchEnded(because="the budget for searching is spent", trials=3, left_s=9.0)
    for stream in (io.StringIO(), Terminal(monkeypatch, 80, term="dumb")):
        with progress_for(stream, Budget(seconds=300.0, started=clock(), clock=clock)) as observer:
            observer(stop)
        first, second = stream.getvalue().splitlines()
        assert first == "[ 300 s left] building the workload"
        assert second == "[   9 s left] search ended after 3 new trials: the budget for searching is spent"
