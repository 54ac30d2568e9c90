"""The time that threads of this process were ready to run and waited for a CPU, as Linux counts it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOST_HOST_DELAY", "RunDelays", "host_delay", "read_run_delays"]

TASKS = Path("/proc/self/task")
# Seconds per second that a thread may wait for a CPU. On two cores, the threads of a convolutional net waited 0.01 on
# the quiet machine, 0.3 to 0.5 beside one busy process and 0.5 beside two.
MOST_HOST_DELAY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDelays:
    """One reading: pairs of a thread's id and the time that it has waited for a CPU since it began.

    `at_s` is the moment of the reading, on a monotonic clock.
    """

    waited_s: tuple[tuple[int, float], ...]
    at_s: float


def read_run_delays(tasks: Path = TASKS) -> RunDelays | None:
    """Returns the waiting times of all threads; None if the system does not count them.

    A Linux without scheduler statistics has the files and writes "0 0 0" into each (`proc_pid_schedstat` in the
    kernel's fs/proc/base.c). A virtual machine cannot see the time for which its host stops it.
    """
    try:
        counters = {int(task.name): _counters(task) for task in tasks.iterdir()}
    except OSError:  # not Linux
        return None
    if not any(any(fields) for fields in counters.values()):
        return None
    waited_s = tuple((thread, fields[1] / 1e9) for thread, fields in counters.items() if fields)
    return RunDelays(waited_s=waited_s, at_s=time.monotonic())


def host_delay(before: RunDelays | None, after: RunDelays | None) -> float | None:
    """Returns the longest time that a thread waited for a CPU, in seconds per second; None if it is unknown.

    It is not the sum over threads: a step waits for its slowest thread, and a sum grows with the number of threads. A
    thread that began between the readings counts; one that ended does not.
    """
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    earlier_s = dict(before.waited_s)
    delays_s = [waited_s - earlier_s.get(thread, 0.0) for thread, waited_s in after.waited_s]
    longest_s = max([0.0, *delays_s])  # a delay is below 0 if a new thread has the id of an ended one
    return longest_s / (after.at_s - before.at_s)


def _counters(task: Path) -> tuple[int, ...]:
    """Returns a thread's time on a CPU in ns, its waiting time in ns and its timeslices; empty if it has just ended.

    The fields are those of Linux's sched-stats.rst.
    """
    try:
        on_cpu_ns, waited_ns, slices = (int(field) for field in (task / "schedstat").read_text().split())
    except (OSError, ValueError):
        return ()
    return on_cpu_ns, waited_ns, slices
