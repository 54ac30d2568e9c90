"""What other programs take of the CPU: a process that never rests is seen, one's own children are not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Measurement
from amptune.measure.workers import other_programs
from amptune.measure.workers.other_programs import OtherPrograms
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK

BUSY = "while True: pass"
THREADS = """
import torch
from torch import nn
import amptune

def loss(model, batch):
    print("threads:", torch.get_num_threads(), flush=True)
    return model(batch).mean()

def workload():
    return amptune.Workload(
        model=lambda: nn.Linear(4, 4),
        batch=lambda n: torch.randn(n, 4),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=2,
    )
"""


@contextmanager
def running(*command: str) -> Iterator[None]:
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.kill()


def seconds_in(watch: OtherPrograms) -> float:
    """Returns the CPU time of others, seconds a second."""
    before_s = watch._seconds()
    time.sleep(0.5)
    return (watch._seconds() - before_s) / 0.5


def test_a_process_that_one_starts_is_no_other_program() -> None:
    added = []
    for _ in range(6):  # others come and go
        watch = OtherPrograms()
        without = seconds_in(watch)
        with running(sys.executable, "-c", BUSY):
            added.append(seconds_in(watch) - without)
    assert min(added) < 0.3


def test_a_program_that_never_rests_keeps_a_core_busy() -> None:
    """Also if one has started it oneself, before."""
    with running(sys.executable, "-c", BUSY):
        watch = OtherPrograms()
        time.sleep(3.0)
        assert watch.busy_cores() >= 1


@pytest.mark.parametrize(
    ("cores", "busy", "usual", "left"),
    [(2, 1, 2, 1), (2, 0, 2, None), (2, 5, 2, 1), (64, 1, 32, None), (64, 40, 32, 24)],
)
def test_as_many_threads_as_find_a_core_of_their_own(
    cores: int, busy: int, usual: int, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_programs, "cores", lambda: cores)
    monkeypatch.setattr(OtherPrograms, "busy_cores", lambda self: busy)  # noqa: ARG005
    assert OtherPrograms().threads_beside(usual) == left


def test_a_system_that_counts_nothing_has_no_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*, percpu: bool) -> None:  # noqa: ARG001
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    assert OtherPrograms()._seconds() == 0.0


def test_workers_leave_out_the_threads_that_would_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run, and those that start later."""
    monkeypatch.setattr(OtherPrograms, "threads_beside", lambda self, usual: 1)  # noqa: ARG005
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(THREADS)
    effort = Effort(warmup_s=0.0, measure_s=0.0, settle_s=0.0, min_steps=1)
    with WorkerEvaluator(Source(target=f"{script}:workload"), "cpu", log) as evaluator:
        prepared = evaluator.prepare(60.0)
        printed = len(log.read_text())
        assert isinstance(evaluator.measure(STOCK, effort), Measurement)
        evaluator.launch([STOCK])
        assert isinstance(evaluator.measure(STOCK, effort), Measurement)
    told = {line for line in log.read_text()[printed:].splitlines() if line.startswith("threads:")}
    assert told == {"threads: 1"}
    assert prepared.subject.threads == 1
    assert [one.code for one in prepared.noticed] == ["busy-cpu"]
