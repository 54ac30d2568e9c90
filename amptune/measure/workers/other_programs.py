"""The CPU cores that other programs keep busy: threads wait for the one of them that has to share its core.

Two threads beside a program that never rests take 3 to 5 times as long as one, and never twice the same
(reports/busy/threads.txt).
"""

from __future__ import annotations

import time

import psutil

from amptune.measure.workers.cpu_share import cores, cores_of_this_process
from amptune.measure.workers.processes import fork_server

__all__ = ["OtherPrograms"]

# The kernel counts time in hundredths of a second, and what starts a program is over soon.
SHORTEST_WATCH_S = 0.5


class OtherPrograms:
    """What other programs take of this process's CPU cores from now on.

    Its children that ran before belong to them, except the one that workers are forked from.
    """

    def __init__(self) -> None:
        self._began_s, self._began = time.monotonic(), time.time()
        self._before_s = self._seconds()

    def busy_cores(self) -> int:
        """Returns how many cores they have kept busy; one that was busy for less than half of the time is free."""
        passed_s = time.monotonic() - self._began_s
        return round((self._seconds() - self._before_s) / passed_s) if passed_s > SHORTEST_WATCH_S else 0

    def threads_beside(self, usual: int) -> int | None:
        """Returns how many threads find a core of their own beside them; None if the `usual` ones do."""
        left = max(1, cores() - self.busy_cores())
        return left if left < usual else None

    def _seconds(self) -> float:
        """Returns the time that the cores have worked for others since they started; 0 if nothing counts it."""
        own = cores_of_this_process()
        try:
            times = [one for core, one in enumerate(psutil.cpu_times(percpu=True)) if core in own]
            mine = [one for root in self._roots() for one in (root, *root.children(recursive=True))]
        except (OSError, psutil.Error):
            return 0.0
        used_s = [psutil.Process().cpu_times()[:4], *map(_seconds_of, mine)]
        return sum(one.user + one.system + getattr(one, "nice", 0.0) for one in times) - sum(map(sum, used_s))

    def _roots(self) -> list[psutil.Process]:
        server = fork_server()
        children = psutil.Process().children()
        return [one for one in children if one.pid == server or one.create_time() >= self._began]


def _seconds_of(process: psutil.Process) -> tuple[float, ...]:
    """Returns the CPU times of a process, and of its children that have ended."""
    try:
        times: tuple[float, ...] = process.cpu_times()[:4]
        return times
    except psutil.Error:  # it has just ended
        return ()
