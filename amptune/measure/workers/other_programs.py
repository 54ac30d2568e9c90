"""The CPU cores that other programs keep busy: threads wait for the one of them that has to share its core.

Two threads beside a program that never rests take 3 to 5 times as long as one, and never twice the same
(reports/busy/threads.txt).
"""

from __future__ import annotations

import sys
import time

import psutil

from amptune.measure.workers.cpu_share import cores, cores_of_this_process
from amptune.measure.workers.processes import fork_server

__all__ = ["OtherPrograms"]

# The kernel counts time in hundredths of a second, and what starts a program is over soon.
SHORTEST_WATCH_S = 1.0
# What services take of each core of an idle machine.
SELDOM = 0.01


class OtherPrograms:
    """A watch over the time that this process's CPU cores work for other programs, from when it is made.

    Children of this process that ran before count as others, except the one that workers are forked from. Programs that
    run under `nice` give way, and count only if this one does too. Only Linux counts what children used that have
    ended; elsewhere nothing is known of others.
    """

    def __init__(self) -> None:
        self._ran_before = frozenset(psutil.Process().children()) if sys.platform == "linux" else frozenset()
        self._is_nice = sys.platform == "linux" and psutil.Process().nice() > 0
        self._began_s, self._before_s = time.monotonic(), self._seconds()

    def busy_cores(self) -> int:
        """Returns how many cores they have kept busy, in all: half a core is none."""
        passed_s, now_s = time.monotonic() - self._began_s, self._seconds()
        if passed_s < SHORTEST_WATCH_S or now_s is None or self._before_s is None:
            return 0
        return round((now_s - self._before_s) / passed_s - SELDOM * cores())

    def _seconds(self) -> float | None:
        """Returns the time that the cores have worked for others since they started; None if that is not known."""
        if sys.platform != "linux":
            return None
        own = cores_of_this_process()
        try:
            times = [one for core, one in enumerate(psutil.cpu_times(percpu=True)) if core in own]
            mine = [one for root in self._roots() for one in (root, *root.children(recursive=True))]
        except (OSError, psutil.Error):
            return None
        worked_s = sum(one.user + one.system + (one.nice if self._is_nice else 0.0) for one in times)
        return worked_s - sum(map(_seconds_of, [psutil.Process(), *mine]))

    def _roots(self) -> list[psutil.Process]:
        """Returns amptune's own children."""
        server = fork_server()
        return [one for one in psutil.Process().children() if one.pid == server or one not in self._ran_before]


def _seconds_of(process: psutil.Process) -> float:
    """Returns the CPU time of a process, and of its children that have ended."""
    try:
        used = process.cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0
    return float(used.user + used.system + used.children_user + used.children_system)
