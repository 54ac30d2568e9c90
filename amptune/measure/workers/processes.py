"""Worker processes: each is a pool of one process, so its death affects no other worker.

The pool is pebble's: it enforces time limits from outside, notices a dead process and starts another.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import pebble
import psutil

from amptune.errors import StudyError, first_line
from amptune.measure.bench.stillness import ProcessIdentity, this_process
from amptune.measure.results.outcome import Failure
from amptune.measure.workers.cpu_share import cores
from amptune.measure.workers.death import death_of, kernel_oom_kills
from amptune.measure.workers.setting import Setting
from amptune.measure.workers.worker import Activity, Reply, start
from amptune.workload.script import imports_of

__all__ = [
    "LIBRARIES",
    "START_LIMIT_S",
    "Pending",
    "WorkerProcess",
    "fork_server",
    "start_importing",
    "stop_all",
    "workers_that_fit",
]

P = ParamSpec("P")
T = TypeVar("T")

# The environment variable by which the fork server learns what to import, as `module` or `module:name`.
LIBRARIES = "AMPTUNE_LIBRARIES"
# Limit until a process takes its first task, for which the fork server may have to import large libraries, and for that
# task: importing torch, opening a CUDA context and building the model, for all contenders at once.
START_LIMIT_S = 120.0
# pebble waits 3 s for a process to end when asked to, then kills it.
END_LIMIT_S = 10.0


@contextmanager
def _without_main() -> Iterator[None]:
    """Lets a process start without importing the parent's `__main__` again.

    A worker does not need `__main__`, because the workload is passed as a target or pickled by value. A training script
    without a `__main__` guard would start tuning again in every worker.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _SpawnWithoutMain(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # the name multiprocessing calls
        with _without_main():
            return SpawnProcess._Popen(process_obj)


class _Spawning(SpawnContext):
    Process = _SpawnWithoutMain


if sys.platform == "linux":
    from multiprocessing import forkserver, resource_tracker
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    class _ForkWithoutMain(ForkServerProcess):
        @staticmethod
        def _Popen(process_obj: Any) -> Any:  # noqa: N802
            with _without_main():
                return ForkServerProcess._Popen(process_obj)

    class _Forking(ForkServerContext):
        Process = _ForkWithoutMain


def start_importing(target: str = "") -> bool:
    """Starts the imports that all workers need in the process they are forked from; returns False without such a one.

    These include the installed libraries that a target's file imports. On Linux that process is multiprocessing's fork
    server, unless it cannot have a socket: a long TMPDIR makes the path too long. If the program has already started
    it, workers do missing imports themselves.
    """
    if sys.platform != "linux":
        return False
    forkserver.set_forkserver_preload(["amptune.measure.workers.preloaded"])
    os.environ[LIBRARIES] = " ".join(imports_of(target)) if target else ""
    method = multiprocessing.get_start_method(allow_none=True)
    try:
        with _interrupts_held():
            forkserver.ensure_running()
    except OSError:
        return False
    finally:
        del os.environ[LIBRARIES]
        multiprocessing.set_start_method(method, force=True)  # starting the server chooses one for good
    return True


def fork_server() -> int | None:
    """Returns the id of the process that workers are forked from; None if there is none."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None) if sys.platform == "linux" else None


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Holds Ctrl-C and the end of the terminal back.

    The fork server, started meanwhile, does so too until it ignores them (`preloaded`).
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # its first start lets Ctrl-C through again
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _context() -> BaseContext:
    return _Forking() if start_importing() else _Spawning()


class Pending(Generic[T]):
    """The answer of a worker to one task, which may not have come yet."""

    def __init__(self, process: WorkerProcess, future: Future[T], limit_s: float | None) -> None:
        self.process, self._future, self._limit_s = process, future, limit_s
        self._kills_before = kernel_oom_kills()
        self._asked_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if the answer has come, or its limit is over."""
        return self._future.done() or self._left_s == 0.0

    def answer(self) -> T | Failure:
        """Waits for the answer; returns it, or a failure as `WorkerProcess.call` does."""
        process = self.process
        try:
            return self._future.result(timeout=self._left_s)
        except FutureTimeoutError:
            process.stop()
            what = f"no answer within {self._limit_s or 0.0:.0f} s: {process.activity}; the worker was replaced"
            return Failure(kind="timeout", message=f"{what}, its output is in {process.log}")
        except BrokenProcessPool as broken:
            process.stop()
            raise process.cannot_start(broken) from broken
        except pebble.ProcessExpired as expired:
            code, one = expired.exitcode, process.identity
            if (
                one is not None and one.runs
            ):  # the process that it was forked from was killed: pebble takes it for ended
                code = -signal.SIGKILL
                with suppress(OSError):
                    os.kill(one.pid, signal.SIGKILL)
            process.stop()
            return death_of("worker", code, process.log, self._kills_before)

    @property
    def _left_s(self) -> float | None:
        """Returns what is left of the limit, the start of the process and what it did before included.

        pebble is not given it: that counts by the system's clock, which may be set meanwhile.
        """
        return None if self._limit_s is None else max(0.0, self._asked_s + self._limit_s - time.monotonic())

    @staticmethod
    def wait_for_one(pending: Iterable[Pending[T]], limit_s: float) -> None:
        """Waits until one of the answers has come or is past its limit, or for `limit_s` seconds."""
        several = list(pending)
        left_s = (one._left_s for one in several)
        wait_s = min([limit_s, *(one_s for one_s in left_s if one_s is not None)])
        wait([one._future for one in several], timeout=wait_s, return_when=FIRST_COMPLETED)


class WorkerProcess:
    """One process, started at the first call and replaced after it dies, hangs or is stopped."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._pool: pebble.ProcessPool | None = None
        self._identity: Future[ProcessIdentity] = Future()
        self.activity: Activity | None = None
        """What the process that was started last is doing."""

    def call(self, limit_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failure:
        """Runs the function in the worker; returns its result, or a failure (`timeout`, `crash`, `killed`, `oom`).

        `limit_s` includes the start of a process that does not run yet: importing torch, opening a CUDA context,
        building the model. An exception of the function is raised here. If somebody else kills the process, another one
        runs the function in the time that is left.
        """
        until_s = time.monotonic() + limit_s
        answer = self.begin(limit_s, function, *args, **kwargs).answer()
        outcome = answer.outcome if isinstance(answer, Reply) else answer
        if not (isinstance(outcome, Failure) and outcome.kind == "killed"):
            return answer
        self.stop()  # of several ranks, those that are left
        return self.begin(until_s - time.monotonic(), function, *args, **kwargs).answer()

    def begin(self, limit_s: float | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        """Starts the function in the worker and returns its pending answer; None is no limit.

        Raises `StudyError` if no process can be started.
        """
        for has_failed in (False, True):
            try:
                future = self._running().schedule(function, args=args, kwargs=kwargs)
                break
            except (OSError, RuntimeError) as error:  # it or its parent was killed; or no file or thread is left
                self.stop()
                if has_failed:
                    raise self.cannot_start(error) from error
        return Pending(self, future, limit_s)

    def cannot_start(self, error: BaseException) -> StudyError:
        why = first_line(error.__cause__ or error)
        return StudyError(f"no worker process can be started (its log is {self.log}): {why}")

    @property
    def log(self) -> Path:
        """The file that takes what the user's code prints."""
        return self._setting.log

    @property
    def runs(self) -> bool:
        return self._pool is not None

    @property
    def identity(self) -> ProcessIdentity | None:
        """Returns which process it is, once it has started; None if none runs."""
        if self._pool is None:
            return None
        try:
            return self._identity.result(timeout=END_LIMIT_S)
        except (FutureTimeoutError, CancelledError, BrokenProcessPool, pebble.ProcessExpired):
            return None

    def stop(self) -> None:
        """Ends the process at once; the next call starts another."""
        stop_all([self])

    def _running(self) -> pebble.ProcessPool:
        if self._pool is not None and not self._pool.active:  # its process died while it had nothing to do
            self.stop()
        if self._pool is None:
            context = _context()
            self.activity = Activity(context)
            start_method = multiprocessing.get_start_method(allow_none=True)
            self._pool = pebble.ProcessPool(
                max_workers=1,
                initializer=start,
                initargs=(self._setting, dict(os.environ), start_method, self.activity),
                context=context,
            )
            try:
                self._identity = self._pool.schedule(this_process)
            except KeyboardInterrupt:  # its parent still imports: it would fork a process that finds nobody any more
                if (server := fork_server()) is not None:
                    os.kill(server, signal.SIGKILL)
                raise
        return self._pool


def stop_all(processes: Iterable[WorkerProcess]) -> None:
    """Ends all processes in parallel: one with a CUDA context takes a fifth of a second to end.

    One that a driver holds cannot be killed, and is waited for no longer than `END_LIMIT_S`.
    """
    joining = []
    for process in processes:
        if process._pool is not None:
            process._pool.stop()  # type: ignore[no-untyped-call]  # pebble has not typed it
            joining.append(threading.Thread(target=process._pool.join, daemon=True))
            process._pool = None
    for thread in joining:
        try:
            thread.start()
        except RuntimeError:  # no thread is left: one after another
            thread.run()
    until_s = time.monotonic() + END_LIMIT_S
    for thread in joining:
        if thread.is_alive():
            thread.join(max(0.0, until_s - time.monotonic()))


def workers_that_fit(ranks: int = 1) -> int:
    """Returns how many more workers fit into half of the available memory, of the largest current size.

    Each is so many processes. If none runs, whose size would tell, one for each core.
    """
    largest = max((_resident_bytes(child) for child in psutil.Process().children(recursive=True)), default=0)
    return int(psutil.virtual_memory().available / 2 / largest / ranks) if largest else cores()


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # the process has just ended
        return 0
