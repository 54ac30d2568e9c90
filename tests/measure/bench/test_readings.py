"""What is read around a block of steps, what counts as a disturbance, and what a run says about them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple

import psutil
import pytest
from scripted import HW_THERMAL, IDLE, POWER_CAP, ScriptedMemory, ScriptedNvml

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
from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.findings import Finding

CLEAN = Readings(clock_event_reasons=0, sm_clock_mhz=1980, temperature_c=40, energy_j=1.0, foreign_processes=())


def instruments_of(nvml: NvmlGpu | None, memory: ScriptedMemory | None = None) -> Instruments:
    """Instruments on a host that does not count how long threads wait for a CPU."""
    return Instruments(nvml, memory or ScriptedMemory(), lambda: None)


def delays(at_s: float, *waited_s: float) -> RunDelays:
    return RunDelays(waited_s=tuple(enumerate(waited_s)), at_s=at_s)


def read(nvml: NvmlGpu | None) -> Readings:
    return instruments_of(nvml).read()


def test_all_instruments_are_read_in_the_units_of_their_names() -> None:
    nvml = ScriptedNvml(reasons=POWER_CAP, sm_clock_mhz=1500, temperature_c=61, energy_mj=2500)
    memory = ScriptedMemory()
    memory.retries = lambda: 3
    assert Instruments(nvml.gpu(), memory, lambda: delays(2.0, 0.5)).read() == Readings(
        clock_event_reasons=POWER_CAP,
        sm_clock_mhz=1500,
        temperature_c=61,
        energy_j=2.5,
        alloc_retries=3,
        foreign_processes=(),
        run_delays=delays(2.0, 0.5),
    )


def test_without_nvml_and_counted_delays_every_reading_is_none_and_nothing_is_contaminated() -> None:
    instruments = instruments_of(None)
    before, after = instruments.read(), with_busy_clocks(instruments.read(), [instruments.clocks()])
    assert before == after == Readings()
    assert contamination(before, after, instruments.sm_clock_max_mhz()) == ()


def test_readings_that_nvml_cannot_give_are_none_and_contaminate_nothing() -> None:
    nvml = ScriptedNvml(reasons=None, sm_clock_mhz=None, temperature_c=None, energy_mj=None)
    readings = read(nvml.gpu())
    assert astuple(readings) == (None, None, None, None, 0, (), None)
    assert contamination(readings, readings, 1980) == ()


def test_another_process_on_the_gpu_is_foreign() -> None:
    stranger = 2**22 + 1  # above the kernel's largest process id
    assert read(ScriptedNvml(pids=(os.getpid(), stranger)).gpu()).foreign_processes == (stranger,)


def test_the_parent_and_siblings_of_a_worker_are_not_foreign() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        # This process's parent has it and its child as descendants, as amptune has all of its workers.
        pids = (os.getpid(), os.getppid(), child.pid)
        foreign = read(ScriptedNvml(pids=pids).gpu()).foreign_processes
        child.communicate(b"\n")
    assert foreign == ()


def test_a_sibling_started_later_is_not_foreign_either() -> None:
    pids = [os.getpid()]
    instruments = instruments_of(ScriptedNvml(pids=lambda: pids).gpu())
    assert instruments.read().foreign_processes == ()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pids.append(child.pid)
        foreign = instruments.read().foreign_processes
        child.communicate(b"\n")
    assert foreign == ()


def test_all_processes_are_looked_through_only_where_a_stranger_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: psutil.Process) -> None:
        raise AssertionError("looked through all processes of the machine")

    monkeypatch.setattr(psutil.Process, "parent", fail)
    assert read(ScriptedNvml().gpu()).foreign_processes == ()


def test_where_kin_cannot_be_asked_for_every_other_process_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "parent", deny)
    assert read(ScriptedNvml(pids=(os.getpid(), os.getppid())).gpu()).foreign_processes == (os.getppid(),)


@pytest.mark.parametrize("pids", [(), (17,)])
def test_where_nvml_does_not_list_this_process_it_cannot_say_which_are_foreign(pids: tuple[int, ...]) -> None:
    nvml = ScriptedNvml(pids=pids)
    assert nvml.gpu().processes() == pids
    assert nvml.gpu().foreign_processes() is None
    assert read(nvml.gpu()).foreign_processes is None


def test_foreign_processes_leave_out_this_one_and_those_told() -> None:
    gpu = ScriptedNvml(pids=(4242, os.getpid(), 17)).gpu()
    assert gpu.foreign_processes() == (17, 4242)
    assert gpu.foreign_processes(exclude=(17,)) == (4242,)


def test_processes_that_nvml_cannot_list_are_none() -> None:
    gpu = ScriptedNvml(pids=None).gpu()
    assert gpu.foreign_processes() is None
    assert gpu.unread() == ("processes: Not Supported",)


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, ()),
        ({"clock_event_reasons": 0x4}, ("power-cap",)),
        ({"clock_event_reasons": 0x8}, ("hw-slowdown",)),
        ({"clock_event_reasons": 0x20}, ("sw-thermal",)),
        ({"clock_event_reasons": 0x40}, ("hw-thermal",)),
        ({"clock_event_reasons": 0x80}, ("power-brake",)),
        ({"clock_event_reasons": 0x48 | IDLE}, ("hw-slowdown", "hw-thermal")),
        ({"clock_event_reasons": 0x1 | 0x2 | 0x10 | 0x100}, ()),
        ({"sm_clock_mhz": 1485}, ()),
        ({"sm_clock_mhz": 1484}, ("low-clock",)),
        ({"sm_clock_mhz": 1484, "clock_event_reasons": 0x4}, ("power-cap",)),
        ({"sm_clock_mhz": 1484, "clock_event_reasons": None}, ("low-clock",)),
        ({"alloc_retries": 1}, ("alloc-retries",)),
        ({"foreign_processes": (17,)}, ("foreign-process",)),
        ({"foreign_processes": None}, ()),
    ],
)
def test_a_block_is_contaminated_by(changes: dict[str, object], codes: tuple[str, ...]) -> None:
    after = Readings(**{**_fields(CLEAN), **changes})  # type: ignore[arg-type]  # fields by name
    assert contamination(CLEAN, after, 1980) == codes


def test_retries_before_the_block_are_not_its_own() -> None:
    thrashed = Readings(alloc_retries=5)
    assert contamination(thrashed, thrashed, None) == ()


@pytest.mark.parametrize(
    ("before", "after", "codes"),
    [
        (delays(1.0, 5.0), delays(3.0, 5.22), ("host-load",)),
        (delays(1.0, 5.0), delays(3.0, 5.18), ()),
        (delays(1.0, 5.0), delays(3.0, 5.0), ()),  # as on a machine whose counter stands still
        (None, delays(3.0, 5.22), ()),
        (delays(1.0, 5.0), None, ()),
        (None, None, ()),
    ],
)
def test_a_block_whose_threads_waited_for_a_cpu_over_a_tenth_of_its_time_is_contaminated(
    before: RunDelays | None, after: RunDelays | None, codes: tuple[str, ...]
) -> None:
    assert contamination(Readings(run_delays=before), Readings(run_delays=after), None) == codes


def test_the_clocks_of_the_busy_gpu_leave_the_delays_as_they_were_read() -> None:
    after = Readings(run_delays=delays(3.0, 1.0))
    assert with_busy_clocks(after, [Readings(sm_clock_mhz=1500)]).run_delays == delays(3.0, 1.0)


def test_a_process_that_left_during_the_block_disturbed_it() -> None:
    assert contamination(Readings(foreign_processes=(17,)), Readings(foreign_processes=()), None) == (
        "foreign-process",
    )


def test_clock_reasons_that_linger_from_the_work_before_are_no_contamination() -> None:
    lingering = Readings(clock_event_reasons=POWER_CAP, sm_clock_mhz=1300)
    assert contamination(lingering, CLEAN, 1980) == ()


def test_of_the_clocks_read_while_busy_the_worst_count() -> None:
    busy = [
        Readings(clock_event_reasons=POWER_CAP, sm_clock_mhz=1700, temperature_c=60),
        Readings(clock_event_reasons=HW_THERMAL, sm_clock_mhz=1500, temperature_c=70),
        Readings(clock_event_reasons=None, sm_clock_mhz=1900, temperature_c=65),
    ]
    merged = with_busy_clocks(CLEAN, busy)
    assert (merged.clock_event_reasons, merged.sm_clock_mhz, merged.temperature_c) == (0x44, 1500, 70)
    assert merged.energy_j == CLEAN.energy_j


def _fields(readings: Readings) -> dict[str, object]:
    return {name: getattr(readings, name) for name in Readings.__dataclass_fields__}


def measurement(**more: object) -> Measurement:
    parts: dict[str, object] = {
        "samples_per_step": 8,
        "step_ms": (10.0, 10.1),
        "warmup_s": 0.3,
        "warmup_steps": 8,
        "peak_allocated_mib": 10.0,
        "peak_reserved_mib": 20.0,
        "losses": (1.0, 0.9),
    }
    return Measurement(**{**parts, **more})  # type: ignore[arg-type]  # parts by name


def only(outcomes: Sequence[Outcome]) -> Finding:
    (finding,) = noticed(outcomes)
    return finding


def test_an_undisturbed_run_has_nothing_to_notice() -> None:
    assert noticed([measurement(), measurement(), Failure(kind="oom", message="out of memory")]) == ()


def test_discarded_blocks_are_counted_with_their_cause() -> None:
    outcomes = [
        measurement(discarded=("hw-thermal",)),
        measurement(discarded=("hw-thermal", "hw-thermal+sw-thermal")),
        *[measurement()] * 7,
    ]
    finding = only(outcomes)
    assert finding.code == "throttled"
    assert finding.message == (
        "3 of 12 blocks were discarded and repeated: "
        "the GPU was thermally throttled (HW thermal), the GPU was thermally throttled (SW thermal)"
    )
    assert finding.figures == {"discarded": 3, "kept": 0, "of": 12}


def test_the_power_cap_and_settled_clocks_are_how_training_will_run() -> None:
    outcomes = [*[measurement(contaminated_by=("power-cap",))] * 3, measurement(contaminated_by=("low-clock",))]
    low, capped = noticed([*outcomes, measurement()])
    assert capped.message == "the GPU ran at its power cap in 3 of 5 measurements; so will training"
    assert capped.figures == {"state": "power-cap", "kept": 3, "of": 5}
    assert low.message.endswith(
        "under 75 % of its highest, for no reason NVML gives, in 1 of 5 measurements; so will training"
    )
    assert {capped.code, low.code} == {"own-load"}


@pytest.mark.parametrize(
    ("cause", "code", "words"),
    [
        ("foreign-process", "foreign-process", "another process was on the GPU"),
        ("host-load", "host-load", "threads had to wait for a CPU (other programs were running, or there are more"),
        ("compiling", "beside-compiling", "graphs were compiling beside it (they stand still for two seconds at most"),
        ("alloc-retries", "allocator-thrashing", "the allocator had to empty its cache"),
        *((code, "throttled", "the GPU") for code in sorted(CLOCK_CODES - OWN_LOAD)),
    ],
)
def test_each_cause_has_its_finding_and_its_words(cause: str, code: str, words: str) -> None:
    finding = only([measurement(discarded=(cause,), contaminated_by=(cause,)), measurement()])
    assert finding.code == code
    assert finding.message.startswith("1 of 3 blocks was discarded and repeated: ")
    assert "; 1 of 2 measurements was taken nevertheless: " in finding.message
    assert words in finding.message
    assert finding.figures == {"discarded": 1, "kept": 1, "of": 3}


def test_causes_of_two_kinds_are_two_findings() -> None:
    found = noticed([measurement(discarded=("hw-thermal+foreign-process+host-load",))])
    assert [finding.code for finding in found] == ["throttled", "foreign-process", "host-load"]
    assert "process" not in found[0].message
    assert "GPU" not in found[2].message


def test_a_machine_whose_counter_stands_still_has_no_finding_about_its_host() -> None:
    assert noticed([measurement(host_delay=0.0), measurement(host_delay=None)]) == ()


def test_trials_that_never_became_steady_are_counted() -> None:
    finding = only([measurement(steady=False), measurement(), measurement()])
    assert finding.code == "unsteady"
    assert finding.message == "in 1 of 3 measurements the step time was not steady when its warm-up ran out of time"
    assert finding.figures == {"discarded": 0, "kept": 1, "of": 3}


def test_abandoned_trials_are_left_out() -> None:
    glance = measurement(abandoned=True, steady=False, contaminated_by=("power-cap",))
    assert noticed([glance, measurement()]) == ()
