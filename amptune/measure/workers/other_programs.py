"""The CPU cores that other programs keep busy: threads wait for the one of them that has to share its core.

Two threads beside a program that never rests take 3 to 5 times as long as one, and never twice the same
(reports/busy/threads.txt).
"""

from __future__ import annotations

import time

import psutil

from amptune.measure.workers.cpu_share import cores, cores_of_this_process

__all__ = ["OtherPrograms"]

# The kernel counts time in hundredths of a second, and what starts a program is over soon.
SHORTEST_WATCH_S = 0.5


class OtherPrograms:
    """What other programs take of this process's CPU cores from now on: all that its own tree of processes does not."""

    def __init__(self) -> None:
        self._began_s, self._before_s = time.monotonic(), _seconds_of_others()

    def busy_cores(self) -> int:
        """Returns how many cores they have kept busy; one that was busy for less than half of the time is free."""
        passed_s = time.monotonic() - self._began_s
        return round((_seconds_of_others() - self._before_s) / passed_s) if passed_s > SHORTEST_WATCH_S else 0

    def threads_beside(self, usual: int) -> int | None:
        """Returns how many threads find a core of their own beside them; None if the `usual` ones do."""
        left = max(1, cores() - self.busy_cores())
        return left if left < usual else None


def _seconds_of_others() -> float:
    """Returns the time that this process's cores have worked for others since they started; 0 if nothing counts it."""
    own_cores, own = cores_of_this_process(), psutil.Process()
    try:
        times = [one for core, one in enumerate(psutil.cpu_times(percpu=True)) if core in own_cores]
        tree = [own, *own.children(recursive=True)]
    except (OSError, psutil.Error):
        return 0.0
    return sum(one.user + one.system + getattr(one, "nice", 0.0) for one in times) - sum(map(_seconds_of, tree))


def _seconds_of(process: psutil.Process) -> float:
    """Returns the CPU time of a process, and of its children that have ended."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.Error:  # it has just ended
        return 0.0
