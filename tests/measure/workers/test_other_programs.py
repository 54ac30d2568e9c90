"""What other programs take of the CPU: a process that never rests is seen, one's own children are not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import misbehaving
import psutil
import pytest

from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Measurement
from amptune.measure.workers import other_programs
from amptune.measure.workers.other_programs import OtherPrograms
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK

BUSY = "while True: pass"


def counted_by(watch: OtherPrograms) -> float:
    found = watch._seconds()
    assert found is not None
    return found


def test_a_process_that_ran_before_is_another_program_and_one_that_one_starts_is_not() -> None:
    """The same process, seen by two watches: whatever else runs, they differ by what it uses."""
    before_it = OtherPrograms()
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        try:
            after_it, own = OtherPrograms(), psutil.Process(process.pid)
            used_s = -sum(own.cpu_times()[:2])
            apart_s = counted_by(before_it) - counted_by(after_it)
            while sum(own.cpu_times()[:2]) < -used_s + 1.0:
                time.sleep(0.1)
            apart_s += counted_by(after_it) - counted_by(before_it)
            used_s += sum(own.cpu_times()[:2])
        finally:
            process.kill()
    assert 0.5 * used_s < apart_s < 1.5 * used_s


@pytest.mark.skipif(sys.platform != "linux", reason="others are counted on Linux alone")
@pytest.mark.parametrize("nice", [0, 10])
def test_programs_under_nice_count_only_if_this_one_is_too(nice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own time stands in what the kernel counts for them then, and would be taken off another sum."""
    times = [SimpleNamespace(user=10.0, system=5.0, nice=100.0)] * (psutil.cpu_count() or 1)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)  # noqa: ARG005
    monkeypatch.setattr(psutil.Process, "nice", lambda _: nice)
    monkeypatch.setattr(other_programs, "_seconds_of", lambda _: 0.0)
    monkeypatch.setattr(other_programs, "cores_of_this_process", lambda: [0])
    assert counted_by(OtherPrograms()) == (115.0 if nice else 15.0)


@pytest.mark.parametrize(
    ("seconds", "passed_s", "cores", "usual", "left"),
    [
        ((100.0, 109.4), 10.0, 2, 2, 1),
        ((100.0, 106.0), 10.0, 2, 2, 1),
        ((100.0, 104.0), 10.0, 2, 2, None),  # half a core is none
        ((100.0, 97.0), 10.0, 2, 2, None),
        ((100.0, 150.0), 10.0, 2, 2, 1),
        ((100.0, 100.9), 0.9, 2, 2, None),  # too short a watch
        ((None, 5e6), 10.0, 2, 2, None),  # a system that does not count
        ((5.0, None), 10.0, 2, 2, None),
        ((0.0, 16.4), 10.0, 64, 64, 63),  # what services take of each core is left out
        ((0.0, 406.4), 10.0, 64, 32, 24),
        ((0.0, 16.4), 10.0, 64, 32, None),
    ],
)
def test_as_many_threads_as_find_a_core_of_their_own(
    seconds: tuple[float | None, ...], passed_s: float, cores: int, usual: int, left: int | None, monkeypatch: Any
) -> None:
    times = iter(seconds)
    monkeypatch.setattr(OtherPrograms, "_seconds", lambda _: next(times))
    monkeypatch.setattr(other_programs, "cores", lambda: cores)
    watch = OtherPrograms()
    watch._began_s -= passed_s
    assert watch.threads_beside(usual) == left


def test_workers_leave_out_the_threads_that_would_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run, and those that start later."""
    monkeypatch.setattr(OtherPrograms, "threads_beside", lambda self, usual: 1)  # noqa: ARG005
    monkeypatch.setenv("THREADS", "2")
    log = tmp_path / "log"
    effort = Effort(warmup_s=0.0, measure_s=0.0, settle_s=0.0, min_steps=1, time_limit_s=240.0)
    with WorkerEvaluator(Source(target=f"{misbehaving.__file__}:workload"), "cpu", log) as evaluator:
        prepared = evaluator.prepare(240.0)
        printed = len(log.read_text())
        assert isinstance(evaluator.measure(STOCK, effort), Measurement)
        evaluator.launch([STOCK])
        assert isinstance(evaluator.measure(STOCK, effort), Measurement)
    told = {line for line in log.read_text()[printed:].splitlines() if line.startswith("threads:")}
    assert told == {"threads: 1"}
    assert prepared.subject.threads == 1
    assert [one.code for one in prepared.noticed] == ["busy-cpu"]
