"""What other programs take of the CPU: a process that never rests is seen, one's own children are not."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from simulated import slow_cpu

from amptune.measure.workers import other_programs
from amptune.measure.workers.other_programs import OtherPrograms

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
    ("seconds", "passed_s", "cores", "busy"),
    [
        ((100.0, 109.4), 10.0, 2, 1),
        ((100.0, 106.0), 10.0, 2, 1),
        ((100.0, 104.0), 10.0, 2, 0),  # half a core is none
        ((100.0, 97.0), 10.0, 2, 0),
        ((100.0, 100.9), 0.9, 2, 0),  # too short a watch
        ((None, 5e6), 10.0, 2, 0),  # a system that does not count
        ((5.0, None), 10.0, 2, 0),
        ((0.0, 16.4), 10.0, 64, 1),  # what services take of each core is left out
        ((0.0, 406.4), 10.0, 64, 40),
    ],
)
def test_the_cores_that_others_keep_busy(
    seconds: tuple[float | None, ...], passed_s: float, cores: int, busy: int, monkeypatch: Any
) -> None:
    times = iter(seconds)
    monkeypatch.setattr(OtherPrograms, "_seconds", lambda _: next(times))
    monkeypatch.setattr(other_programs, "cores", lambda: cores)
    watch = OtherPrograms()
    watch._began_s -= passed_s
    assert watch.busy_cores() == busy


@pytest.mark.parametrize(("busy", "told"), [(0, []), (1, ["busy-cpu"])])
def test_a_busy_cpu_is_told_and_the_baseline_keeps_its_threads(busy: int, told: list[str]) -> None:
    prepared = replace(slow_cpu.SlowCpu("small", 0).prepared, noticed=())
    found = prepared.beside(busy, cores=2)
    assert found.subject == prepared.subject
    assert [one.code for one in found.noticed] == told
