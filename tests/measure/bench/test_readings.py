"""What is read around a block of steps, what counts as a disturbance, and what a run says about them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
from measurements import took
from scripted import IDLE, ScriptedMemory, ScriptedNvml

from amptune.hardware.nvml import NvmlGpu
from amptune.measure.bench.readings import (
    CLOCK_CODES,
    OWN_LOAD,
    Instruments,
    Readings,
    contamination,
    noticed,
    with_busy_clocks,
)
from amptune.measure.bench.run_delay import RunDelays
from amptune.measure.results.outcome import Failure, Outcome

CLEAN = Readings(clock_event_reasons=0, sm_clock_mhz=1980, energy_j=1.0, foreign_processes=())


def instruments_of(nvml: NvmlGpu | None, memory: ScriptedMemory | None = None) -> Instruments:
    """Instruments on a host that does not count how long threads wait for a CPU."""
    return Instruments(nvml, memory or ScriptedMemory(), lambda: None)


def delayed(at_s: float, waited_s: float) -> Readings:
    return Readings(run_delays=RunDelays(waited_s=((0, waited_s),), at_s=at_s))


def test_instruments_that_are_missing_or_give_no_value_read_none_and_contaminate_nothing() -> None:
    mute = ScriptedNvml(reasons=None, sm_clock_mhz=None, energy_mj=None)
    for nvml, foreign in ((None, None), (mute.gpu(), ())):
        instruments = instruments_of(nvml)
        before, after = instruments.read(), with_busy_clocks(instruments.read(), [instruments.clocks()])
        assert before == after == Readings(foreign_processes=foreign)
        assert contamination(before, after, instruments.sm_clock_max_mhz()) == ()


def test_a_process_on_the_gpu_is_foreign_unless_it_is_amptunes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's parent has it and its child as descendants, as amptune has all of its workers."""
    stranger = 2**22 + 1  # above the kernel's largest process id
    pids = [os.getpid(), os.getppid()]
    instruments = instruments_of(ScriptedNvml(pids=lambda: pids).gpu())
    assert instruments.read().foreign_processes == ()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pids.append(child.pid)  # started after a reading
        assert instruments.read().foreign_processes == ()
        child.communicate(b"\n")
    pids[-1] = stranger
    assert instruments.read().foreign_processes == (stranger,)

    def deny(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "parent", deny)
    assert instruments_of(ScriptedNvml(pids=pids[:2]).gpu()).read().foreign_processes == (os.getppid(),)


@pytest.mark.parametrize(
    ("pids", "exclude", "foreign"),
    [
        ((4242, os.getpid(), 17), (), (17, 4242)),
        ((4242, os.getpid(), 17), (17,), (4242,)),
        ((17,), (), None),  # where this process is not listed, nothing is known of others
        (None, (), None),
    ],
)
def test_what_nvml_says_of_other_processes(pids: Any, exclude: tuple[int, ...], foreign: object) -> None:
    gpu = ScriptedNvml(pids=pids).gpu()
    assert gpu.foreign_processes(exclude=exclude) == foreign
    assert gpu.unread() == (() if pids is not None else ("processes: Not Supported",))


@pytest.mark.parametrize(
    ("before", "after", "codes"),
    [
        (CLEAN, CLEAN, ()),
        (CLEAN, replace(CLEAN, clock_event_reasons=0x4), ("power-cap",)),
        (CLEAN, replace(CLEAN, clock_event_reasons=0x20), ("sw-thermal",)),
        (CLEAN, replace(CLEAN, clock_event_reasons=0x80), ("power-brake",)),
        (CLEAN, replace(CLEAN, clock_event_reasons=0x48 | IDLE), ("hw-slowdown", "hw-thermal")),
        (CLEAN, replace(CLEAN, clock_event_reasons=0x1 | 0x2 | 0x10 | 0x100), ()),
        (CLEAN, replace(CLEAN, sm_clock_mhz=1485), ()),
        (CLEAN, replace(CLEAN, sm_clock_mhz=1484), ("low-clock",)),
        (CLEAN, replace(CLEAN, sm_clock_mhz=1484, clock_event_reasons=0x4), ("power-cap",)),
        (CLEAN, replace(CLEAN, sm_clock_mhz=1484, clock_event_reasons=None), ("low-clock",)),
        (CLEAN, replace(CLEAN, alloc_retries=1), ("alloc-retries",)),
        (CLEAN, replace(CLEAN, foreign_processes=(17,)), ("foreign-process",)),
        (replace(CLEAN, foreign_processes=(17,)), CLEAN, ("foreign-process",)),  # it left
        (CLEAN, replace(CLEAN, foreign_processes=None), ()),
        (delayed(1.0, 5.0), delayed(3.0, 5.22), ("host-load",)),
        (delayed(1.0, 5.0), delayed(3.0, 5.18), ()),
        (Readings(), delayed(3.0, 5.22), ()),
    ],
)
def test_a_block_is_contaminated_by(before: Readings, after: Readings, codes: tuple[str, ...]) -> None:
    assert contamination(before, after, 1980) == codes


def test_of_the_busy_gpu_the_worst_clocks_count_and_the_rest_stays_as_it_was_read() -> None:
    busy = (Readings(), replace(CLEAN, clock_event_reasons=0x4), Readings(clock_event_reasons=0x40, sm_clock_mhz=1500))
    assert with_busy_clocks(CLEAN, busy) == replace(CLEAN, clock_event_reasons=0x44, sm_clock_mhz=1500)


@pytest.mark.parametrize(
    ("cause", "code", "words"),
    [
        ("foreign-process", "foreign-process", "another process"),
        ("host-load", "host-load", "wait for a CPU"),
        ("compiling", "beside-compiling", "graphs were compiling"),
        ("alloc-retries", "allocator-thrashing", "the allocator"),
        *((code, "throttled", "the GPU") for code in sorted(CLOCK_CODES - OWN_LOAD)),
    ],
)
def test_each_cause_has_its_finding_and_its_words(cause: str, code: str, words: str) -> None:
    (finding,) = noticed([took(discarded=(cause,), contaminated_by=(cause,)), took()])
    assert finding.code == code
    assert words in finding.message
    assert finding.message.endswith(": 1 timing repeated, 1 of 2 disturbed nevertheless")
    assert finding.figures == {"discarded": 1, "kept": 1, "of": 3}


CAPPED, LOW = took(contaminated_by=("power-cap",)), took(contaminated_by=("low-clock",))
GLANCE = took(abandoned=True, steady=False, contaminated_by=("power-cap",))
THREE = ("hw-thermal+foreign-process+host-load", "hw-thermal")


@pytest.mark.parametrize(
    ("outcomes", "found"),
    [
        ([took(), took(host_delay=0.0), GLANCE, Failure(kind="oom", message="out of memory")], []),
        ([CAPPED, CAPPED, LOW, took()], [("own-load", 0, 1, 4), ("own-load", 0, 2, 4)]),  # as training will run
        ([took(steady=False), took(), took()], [("unsteady", 0, 1, 3)]),
        (
            [took(discarded=THREE), took()],
            [("throttled", 2, 0, 4), ("foreign-process", 1, 0, 4), ("host-load", 1, 0, 4)],
        ),
    ],
)
def test_disturbances_are_counted_by_kind(outcomes: Sequence[Outcome], found: list[object]) -> None:
    findings = noticed(outcomes)
    counted = [(one.code, *(one.figures.get(name, 0) for name in ("discarded", "kept", "of"))) for one in findings]
    assert counted == found
    assert not any("process" in one.message for one in findings if one.code == "throttled")
