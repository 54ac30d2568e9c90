"""How long threads waited for a CPU: read from files as Linux writes them, and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from amptune.measure.bench.run_delay import RunDelays, host_delay, read_run_delays

# It runs on the one CPU whose number it is given, and says when it does.
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these files and CPU affinity")


def tasks_in(folder: Path, **threads: str | None) -> Path:
    """A folder like `/proc/self/task`, with a file for each thread that has not ended (`t17="1 2 3"`)."""
    for name, text in threads.items():
        task = folder / name.removeprefix("t")
        task.mkdir()
        if text is not None:
            (task / "schedstat").write_text(text)
    return folder


def waited(tasks: Path) -> dict[int, float] | None:
    reading = read_run_delays(tasks)
    return None if reading is None else dict(reading.waited_s)


def delays(at_s: float, **threads: float) -> RunDelays:
    return RunDelays(waited_s=tuple((ord(name), seconds) for name, seconds in threads.items()), at_s=at_s)


# Reading.


def test_the_second_field_of_each_thread_is_its_waiting_time_in_ns(tmp_path: Path) -> None:
    tasks = tasks_in(tmp_path, t17="9000000000 1500000000 42\n", t18="1000 0 7\n")
    assert waited(tasks) == {17: 1.5, 18: 0.0}


def test_the_moment_of_a_reading_is_on_a_monotonic_clock(tmp_path: Path) -> None:
    tasks, before_s = tasks_in(tmp_path, t17="1 2 3"), time.monotonic()
    reading = read_run_delays(tasks)
    assert reading is not None
    assert before_s <= reading.at_s <= time.monotonic()


@pytest.mark.parametrize("ended", [None, ""])
def test_a_thread_that_ends_during_the_reading_is_left_out(tmp_path: Path, ended: str | None) -> None:
    assert waited(tasks_in(tmp_path, t17="9 2000000000 3", t18=ended)) == {17: 2.0}


def test_a_system_without_the_files_counts_nothing(tmp_path: Path) -> None:
    assert read_run_delays(tmp_path / "missing") is None
    assert read_run_delays(tasks_in(tmp_path, t17=None)) is None


def test_zeros_alone_mean_that_the_kernel_does_not_count(tmp_path: Path) -> None:
    assert read_run_delays(tasks_in(tmp_path, t17="0 0 0\n", t18="0 0 0\n")) is None


def test_a_counter_that_stands_still_beside_counted_work_is_no_delay(tmp_path: Path) -> None:
    assert waited(tasks_in(tmp_path, t17="9000 0 3\n")) == {17: 0.0}


# The delay between two readings.


def test_the_delay_is_that_of_the_thread_that_waited_longest() -> None:
    assert host_delay(delays(1.0, a=5.0, b=7.0), delays(3.0, a=5.2, b=7.6)) == pytest.approx(0.3)


def test_many_threads_that_waited_a_little_are_no_long_delay() -> None:
    """On a quiet machine of many cores the sum over threads is large."""
    before, after = (RunDelays(waited_s=tuple((n, s) for n in range(128)), at_s=s * 100) for s in (0.01, 0.02))
    assert host_delay(before, after) == pytest.approx(0.01)


def test_a_thread_that_ended_does_not_hide_the_delay_of_another() -> None:
    assert host_delay(delays(1.0, a=5.0, b=90.0), delays(2.0, a=5.4)) == pytest.approx(0.4)


def test_without_threads_there_is_no_delay() -> None:
    assert host_delay(delays(1.0), delays(2.0)) == 0.0


def test_a_thread_that_began_between_the_readings_counts() -> None:
    assert host_delay(delays(1.0, a=5.0), delays(2.0, a=5.0, b=0.4)) == pytest.approx(0.4)


def test_a_new_thread_with_the_id_of_an_ended_one_has_no_negative_delay() -> None:
    assert host_delay(delays(1.0, a=5.0), delays(2.0, a=0.1)) == 0.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, delays(2.0, a=1.0)),
        (delays(1.0, a=1.0), None),
        (None, None),
        (delays(2.0, a=1.0), delays(2.0, a=1.0)),
    ],
)
def test_without_two_readings_at_different_times_the_delay_is_unknown(
    before: RunDelays | None, after: RunDelays | None
) -> None:
    assert host_delay(before, after) is None


# This machine.


@contextmanager
def beside_a_busy_process() -> Iterator[None]:
    """Keeps this thread on one CPU, on which another process is always busy."""
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    with subprocess.Popen([sys.executable, "-c", SPIN, str(cpu)], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            os.sched_setaffinity(0, {cpu})
            yield
        finally:
            os.sched_setaffinity(0, allowed)
            busy.kill()


def own_waiting_ns() -> int:
    """This thread's waiting time as the kernel writes it; 0 if it does not."""
    file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(file.read_text().split()[1]) if file.exists() else 0


def works_until_delayed(limit_s: float = 5.0) -> bool:
    """Works until this thread has waited for a CPU; False if the kernel never says so."""
    begin_ns, end_s = own_waiting_ns(), time.monotonic() + limit_s
    while time.monotonic() < end_s:
        sum(range(100_000))
        if own_waiting_ns() > begin_ns:
            return True
    return False


@ON_LINUX
def test_a_process_beside_a_busy_one_has_waited_for_a_cpu() -> None:
    with beside_a_busy_process():
        before = read_run_delays()
        delayed = works_until_delayed()
        after = read_run_delays()
    if not delayed:
        pytest.skip("this machine does not count how long threads wait for a CPU")
    delay = host_delay(before, after)
    assert delay is not None
    assert delay > 0
