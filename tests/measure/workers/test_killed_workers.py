"""Workers, and the process they are forked from, that somebody kills; a clock that is set; no files or threads left."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import asking
import pebble
import psutil
import pytest

from amptune.errors import StudyError
from amptune.measure.bench.stillness import ProcessIdentity, start_of
from amptune.measure.results.outcome import Failure
from amptune.measure.workers.death import death_of
from amptune.measure.workers.processes import WorkerProcess, fork_server, stop_all
from amptune.measure.workers.setting import Setting
from amptune.measure.workers.source import Source

LIMIT_S = 240.0  # as test_processes has it
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux alone")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    setting = Setting(source=Source(target="amptune.workload.zoo:digits"), device="cpu", log=tmp_path / "workers.log")
    worker = WorkerProcess(setting)
    yield worker
    worker.stop()


@pytest.mark.parametrize("parent", [False, True], ids=["the worker", "the process that it was forked from"])
def test_another_process_answers_if_one_is_killed(worker: WorkerProcess, tmp_path: Path, parent: bool) -> None:
    marker = tmp_path / "killed"
    assert worker.call(LIMIT_S, asking.killed_once, str(marker), parent=parent) == "answered"
    killed = int(marker.read_text())
    while ProcessIdentity(pid=killed, started_s=start_of(killed)).runs:  # it has been killed, or was
        pass
    assert worker.call(LIMIT_S, os.getppid) == fork_server()


@pytest.mark.parametrize(
    ("code", "kind"),
    [(-signal.SIGKILL, "killed"), (-signal.SIGHUP, "killed"), (-signal.SIGSEGV, "crash"), (3, "crash")],
)
def test_only_signals_of_others_are_no_crash(code: int, kind: str) -> None:
    assert death_of("worker", code, Path("log"), kills_before=10**9).kind == kind


def test_one_that_is_killed_again_is_a_failure(worker: WorkerProcess) -> None:
    failure = worker.call(LIMIT_S, signal.raise_signal, signal.SIGKILL)
    assert isinstance(failure, Failure)
    assert failure.kind == "killed"


def test_a_clock_that_is_set_takes_no_time_from_a_task(
    worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.call(LIMIT_S, os.getpid)
    now_s = count(time.time(), 3600.0)
    monkeypatch.setattr(time, "time", lambda: next(now_s))
    pending = worker.begin(LIMIT_S, asking.come, str(tmp_path / "marker"))
    while not pending._future.running():
        pass
    assert worker._pool is not None
    worker._pool._pool_manager.update_status()  # type: ignore[no-untyped-call]  # as pebble does all the time
    (tmp_path / "marker").touch()
    assert pending.answer() == "come"


def test_without_threads_no_worker_starts_and_one_that_runs_ends(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = psutil.Process(worker.call(LIMIT_S, os.getpid))  # type: ignore[arg-type]

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    stop_all([worker])
    assert not process.is_running()
    with pytest.raises(StudyError, match=r"no worker process can be started .*: can't start new thread"):
        worker.call(LIMIT_S, os.getpid)


def test_an_interrupted_start_leaves_no_process_that_would_fork_one(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.call(LIMIT_S, os.getpid)
    worker.stop()
    server = psutil.Process(fork_server())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pebble.ProcessPool, "schedule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.begin(math.inf, os.getpid)
    while server.status() != psutil.STATUS_ZOMBIE:  # not reaped here: multiprocessing does that when it starts another
        pass
