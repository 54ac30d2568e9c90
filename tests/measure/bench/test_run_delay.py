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


def delays(at_s: float, **threads: float) -> RunDelays:
    return RunDelays(waited_s=tuple((ord(name), seconds) for name, seconds in threads.items()), at_s=at_s)


# Reading.


@pytest.mark.parametrize(
    ("threads", "waiting"),
    [
        ({"t17": "9000000000 1500000000 42\n", "t18": "1000 0 7\n"}, {17: 1.5, 18: 0.0}),  # the second field, in ns
        ({"t17": "9 2000000000 3", "t18": None}, {17: 2.0}),  # a thread that ends meanwhile
        ({"t17": "9 2000000000 3", "t18": ""}, {17: 2.0}),
        ({"t17": "9000 0 3\n"}, {17: 0.0}),  # a counter that stands still beside counted work
        ({"t17": "0 0 0\n", "t18": "0 0 0\n"}, None),  # the kernel does not count
        ({"t17": None}, None),  # a system without the files
    ],
)
def test_the_waiting_times_of_all_threads_are_read(
    tmp_path: Path, threads: dict[str, str | None], waiting: dict[int, float] | None
) -> None:
    before_s, reading = time.monotonic(), read_run_delays(tasks_in(tmp_path, **threads))
    assert (None if reading is None else dict(reading.waited_s)) == waiting
    assert reading is None or before_s <= reading.at_s <= time.monotonic()
    assert read_run_delays(tmp_path / "missing") is None


# The delay between two readings.


@pytest.mark.parametrize(
    ("before", "after", "delay"),
    [
        (delays(1.0, a=5.0, b=7.0), delays(3.0, a=5.2, b=7.6), 0.3),  # of the thread that waited longest
        (delays(1.0, a=5.0, b=90.0), delays(2.0, a=5.4), 0.4),  # another has ended
        (delays(1.0, a=5.0), delays(2.0, a=5.0, b=0.4), 0.4),  # it began between the readings
        (delays(1.0, a=5.0), delays(2.0, a=0.1), 0.0),  # a new thread with the id of an ended one
        (delays(1.0), delays(2.0), 0.0),
        (None, delays(2.0, a=1.0), None),
        (delays(1.0, a=1.0), None, None),
        (delays(2.0, a=1.0), delays(2.0, a=1.0), None),  # no time between them
    ],
)
def test_the_delay_is_that_of_the_thread_that_waited_longest(
    before: RunDelays | None, after: RunDelays | None, delay: float | None
) -> None:
    found = host_delay(before, after)
    assert found == (None if delay is None else pytest.approx(delay))


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


def works_until_delayed(rounds: int = 10_000) -> bool:
    """Works until this thread has waited for a CPU; False if the kernel never says so."""
    begin_ns = own_waiting_ns()
    return any(own_waiting_ns() > begin_ns or sum(range(100_000)) < 0 for _ in range(rounds))


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
