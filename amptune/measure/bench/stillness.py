"""Stillness: the processes that compile are stopped while a block of steps is timed, and go on after it.

They use the GPU and the CPU cores now and then: an encoder-decoder's step of 27 ms took 39 to 44 ms beside them on an
H100 (issue 44). The measuring process stops them, since it alone knows when a block begins and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

__all__ = ["ProcessIdentity", "Stillness", "StoppedTrees", "start_of", "this_process"]

T = TypeVar("T")

# No process stands still for longer, whatever becomes of the one that stopped it. This also ends any wait of the
# measured process for a lock that a stopped one holds.
LIMIT_S = 2
# A process that its parent has not reaped is still listed.
_ENDED = psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD
# A process stops when it leaves the kernel; a block begins without those that take longer.
SETTLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process by its id and its `start_of`, since ids are used again."""

    pid: int
    started_s: float

    @property
    def runs(self) -> bool:
        return (process := _found(self)) is not None and _of(process.status) not in (*_ENDED, None)


class Stillness:
    """The pauses of processes that compile `beside` a trial, one for each block of steps.

    Without such processes a pause does nothing. If they `go_on`, it only tells that they did.
    """

    def __init__(self, beside: Sequence[ProcessIdentity] = (), *, go_on: bool = False) -> None:
        self._beside = beside
        self._go_on = go_on

    @contextlib.contextmanager
    def pause(self) -> Iterator[StoppedTrees]:
        """Stops the processes and what they started, and lets all go on at its end.

        They go on sooner if this process begins to compile, since it may wait for a lock of theirs, and after
        `LIMIT_S`, also if this process is killed.
        """
        trees = StoppedTrees(self._beside)
        try:
            with _at_compilation(trees.release):
                if not self._go_on:
                    trees.stop()
                yield trees
        finally:
            trees.release()


class StoppedTrees:
    """Processes and all that they started, which stand still from `stop` to `release`."""

    def __init__(self, roots: Sequence[ProcessIdentity]) -> None:
        self._roots = roots
        self._stopped: list[psutil.Process] = []
        self._watchdogs: list[subprocess.Popen[bytes]] = []
        self._is_released = False

    @property
    def has_stopped(self) -> bool:
        """True if there was a process to stop."""
        return bool(self._stopped)

    @property
    def is_quiet(self) -> bool:
        """True if all have stood still until now."""
        return not self._is_released and not any(map(_runs, self._trees()))

    def stop(self) -> None:
        """Stops parents before their children, and lists anew until nothing was born meanwhile.

        A system that cannot stop processes (Windows) lets them run, and they are not quiet.
        """
        if not hasattr(signal, "SIGSTOP"):
            return
        until_s = time.monotonic() + LIMIT_S
        while (new := self._unseen()) and time.monotonic() < until_s:
            try:
                self._watchdogs.append(_watchdog(new))
            except OSError:  # no memory or no process left for it: without a watchdog nothing is stopped
                return
            self._stopped += new
            for process in new:
                _of(process.suspend)
            settled_s = time.monotonic() + SETTLE_S
            while any(map(_runs, new)) and time.monotonic() < settled_s:
                time.sleep(SETTLE_S / 100)

    def release(self) -> None:
        """Lets all go on; a second call does nothing."""
        if not self._is_released:
            self._is_released = True
            for process in self._stopped:
                _of(process.resume)
            for watchdog in self._watchdogs:
                _end(watchdog)

    def _unseen(self) -> list[psutil.Process]:
        return [process for process in self._trees() if process not in self._stopped]

    def _trees(self) -> list[psutil.Process]:
        """Returns the processes that run now, each before those that it started."""
        roots = [process for root in self._roots if (process := _found(root)) is not None]
        parents = {parent for root in roots if (parent := _of(root.parent)) is not None}
        found: dict[int, psutil.Process] = {}
        # Workers have one parent. To list what it started is to look at all processes, once instead of for each root.
        for parent in parents:
            for process in _of(partial(parent.children, recursive=True)) or ():
                if process in roots or _of(process.ppid) in found:
                    found[process.pid] = process
        return list(found.values())


def this_process() -> ProcessIdentity:
    return ProcessIdentity(pid=os.getpid(), started_s=start_of(os.getpid()))


def start_of(pid: int) -> float:
    """Returns when a process started, 0 if it has ended: in Linux's own ticks, as the system's clock may be set."""
    if sys.platform != "linux":
        return _of(lambda: psutil.Process(pid).create_time()) or 0.0
    with contextlib.suppress(OSError):
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0.0


def _found(identity: ProcessIdentity) -> psutil.Process | None:
    process = _of(lambda: psutil.Process(identity.pid))
    return process if start_of(identity.pid) == identity.started_s else None


def _of(ask: Callable[[], T]) -> T | None:
    """Returns what is asked of a process; None if it has ended."""
    try:
        return ask()
    except psutil.Error:
        return None


def _runs(process: psutil.Process) -> bool:
    return _of(process.status) not in (psutil.STATUS_STOPPED, *_ENDED, None)


def _watchdog(processes: Sequence[psutil.Process]) -> subprocess.Popen[bytes]:
    """Starts a process that lets others go on after `LIMIT_S`; in its own session, where no signal to ours ends it."""
    pids = [str(process.pid) for process in processes]
    return subprocess.Popen(  # noqa: S603  # numbers alone are filled in
        ["/bin/sh", "-c", 'sleep "$0"; kill -CONT "$@"', str(LIMIT_S), *pids],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(watchdog: subprocess.Popen[bytes]) -> None:
    if watchdog.poll() is None:
        with contextlib.suppress(OSError):  # it has just ended
            os.killpg(watchdog.pid, signal.SIGKILL)  # its `sleep` too
        watchdog.wait()


@contextlib.contextmanager
def _at_compilation(act: Callable[[], object]) -> Iterator[None]:
    """Calls `act` whenever torch.compile begins to compile in this process, or to record a CUDA graph."""
    dynamo = sys.modules.get("torch._dynamo.callback")  # seconds to import; the first optimizer does so
    if dynamo is None:
        yield
        return
    callback = dynamo.callback_handler.register_start_callback(lambda *_: act())
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # `torch.compiler.reset` may have dropped it
            dynamo.callback_handler.remove_start_callback(callback)
