"""How workers are started: forked where that is possible, and yet as fresh as a process of their own."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asking
import misbehaving
import psutil
import pytest
import torch
from pebble.common.types import CONSTS

from amptune.measure.workers import processes
from amptune.measure.workers.processes import WorkerProcess, stop_all
from amptune.measure.workers.setting import Setting
from amptune.measure.workers.source import Source

LIMIT_S = 240.0  # a minute on a slow and busy machine is nothing; the whole test has 300 s
FORKED = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux alone")


def worker(log: Path, target: str = "amptune.workload.zoo:digits") -> WorkerProcess:
    return WorkerProcess(Setting(source=Source(target=target), device="cpu", log=log / "workers.log"))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    workers = [worker(tmp_path), worker(tmp_path)]
    yield workers
    stop_all(workers)


@FORKED
def test_workers_are_forked_from_one_process_that_has_imported_torch_and_replaced_by_others(
    two: list[WorkerProcess],
) -> None:
    (parent,) = {one.call(LIMIT_S, os.getppid) for one in two}
    assert parent != os.getpid()
    before = {one.call(LIMIT_S, os.getpid) for one in two}
    assert len(before) == 2
    assert two[0].call(LIMIT_S, asking.has_imported, "torch._dynamo") is True
    stop_all(two)
    assert not any(one.runs for one in two)
    assert two[0].call(LIMIT_S, os.getppid) == parent
    assert two[0].call(LIMIT_S, os.getpid) not in before


def test_one_that_does_not_end_is_not_waited_for(two: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a driver holds; this one ignores that it is asked to end, and is not killed either."""
    monkeypatch.setattr(processes, "END_LIMIT_S", 0.5)
    monkeypatch.setattr(CONSTS, "term_timeout", 10 * LIMIT_S)
    two[0].call(LIMIT_S, signal.signal, signal.SIGTERM, signal.SIG_IGN)
    process = psutil.Process(two[0].call(LIMIT_S, os.getpid))  # type: ignore[arg-type]
    two[0].begin(LIMIT_S, time.sleep, LIMIT_S)
    stop_all(two)
    assert process.is_running()
    process.kill()


def test_where_there_can_be_no_socket_to_fork_by_a_worker_is_spawned(
    two: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_long() -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", too_long)
    assert two[0].call(LIMIT_S, os.getppid) == os.getpid()


def test_a_worker_has_the_environment_of_the_moment_the_scripts_arguments_and_the_users_start_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPTUNE_ASKED", "before")
    source = Source(target="/a/train.py:workload", arguments=("--lr", "0.1"))
    one = WorkerProcess(Setting(source=source, device="cpu", log=tmp_path / "workers.log"))
    monkeypatch.setenv("AMPTUNE_ASKED", "now")
    assert one.call(LIMIT_S, os.getenv, "AMPTUNE_ASKED") == "now"
    assert one.call(LIMIT_S, asking.argv) == ["/a/train.py", "--lr", "0.1"]
    assert one.call(LIMIT_S, multiprocessing.get_start_method) == multiprocessing.get_start_method()
    stop_all([one])


def test_what_a_script_draws_while_it_is_imported_is_the_same_in_every_process(tmp_path: Path) -> None:
    workers = [worker(tmp_path, f"{misbehaving.__file__}:drawn_at_import") for _ in range(2)]
    one, other = (each.call(LIMIT_S, asking.drawn) for each in workers)
    stop_all(workers)
    assert isinstance(one, tuple)
    assert one == other


LIBRARY = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
# A driver as CUDA's: devices can be counted after it was initialized.
DRIVER = """
static int ready;
int cuInit(unsigned flags) { ready = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return ready ? 0 : 3; }
"""
COMPILER = shutil.which("cc") or ""
CUDA_LIBRARY = """
import ctypes, pathlib
driver = ctypes.CDLL(str(pathlib.Path(__file__).with_name("libcuda.so.1")))
"""
SERVER = """
import sys, threading
import amptune.workload.user_errors as errors
errors.is_the_users = lambda file: False  # what lies beside this program counts as installed
import amptune.measure.workers.preloaded
print(sorted({"quiet_library", "busy_library", "cuda_library"} & set(sys.modules)), threading.active_count())
"""


@FORKED
@pytest.mark.parametrize(
    ("libraries", "imported"), [("quiet_library:nothing missing", ["quiet_library"]), ("busy_library", [])]
)
def test_libraries_are_imported_once_for_all_but_none_that_starts_threads(
    tmp_path: Path, libraries: str, imported: list[str]
) -> None:
    (tmp_path / "quiet_library.py").touch()
    (tmp_path / "busy_library.py").write_text(LIBRARY)
    assert served(libraries, tmp_path) == f"{imported} 1\n"


@FORKED
@pytest.mark.skipif(not COMPILER, reason="a driver is compiled")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of this machine is loaded in its place")
@pytest.mark.parametrize(("calls", "imported"), [("", ["cuda_library"]), ("driver.cuInit(0)", [])])
def test_libraries_may_load_cuda_s_driver_but_not_call_it(tmp_path: Path, calls: str, imported: list[str]) -> None:
    """Forked from a process that did, a worker would end with "CUDA error: initialization error"."""
    (tmp_path / "driver.c").write_text(DRIVER)
    named = ["-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run([COMPILER, "-shared", "-fPIC", str(tmp_path / "driver.c"), *named], check=True)
    (tmp_path / "cuda_library.py").write_text(CUDA_LIBRARY + calls)
    assert served("cuda_library", tmp_path) == f"{imported} 1\n"


def served(libraries: str, folder: Path) -> str:
    """Returns the libraries that the fork server has imported, and the number of its threads."""
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = os.environ | {processes.LIBRARIES: libraries, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", SERVER], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@FORKED
def test_the_callers_start_method_stays_open() -> None:
    code = (
        "import multiprocessing; from amptune.measure.workers.processes import start_importing; start_importing();"
        "multiprocessing.set_start_method('spawn'); print(multiprocessing.get_start_method())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "spawn\n"
