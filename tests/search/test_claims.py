"""Workers that have ended while they held a claim, folders that several tune in, and drivers that are missing."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import psutil
import pytest
from test_study import BF16, opened

from amptune.errors import DeviceError, StudyError
from amptune.search.sampler.backend import database_at, storage_errors
from amptune.search.sampler.claims import _has_ended_here, _place

TESTS = Path(__file__).resolve().parents[1]
needs_place = pytest.mark.skipif(_place() == "-", reason="process ids mean the same everywhere on Linux alone")

# A worker that begins a trial and never ends it.
BEGINS = """
import sys
sys.path[:0] = sys.argv[1:]
import time
from pathlib import Path
from test_study import BF16, opened
print(opened(Path("study"), "killed").claim(BF16), flush=True)
time.sleep(600)
"""


@needs_place
def test_what_a_killed_worker_had_is_free_at_once_on_its_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGINS, *map(str, (TESTS, TESTS / "search")), *sys.path]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"True\n"
        study = opened(tmp_path / "study")
        assert not study.claim(BF16)
        assert study.elsewhere == {BF16}
        worker.kill()
    assert study.claim(BF16)
    assert study._store.new_trials() == [], "what was not measured leaves no trial"


@needs_place
def test_a_process_that_was_not_reaped_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = f"name {_place()} {process.pid}"
        assert not _has_ended_here(owner)
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert _has_ended_here(owner)
    assert _has_ended_here(owner)


# A writer that is killed while it holds the journal's lock.
WRITES = """
import os, signal, sys
from pathlib import Path
from amptune.search.sampler.journal import Journal
Journal(Path(sys.argv[1]))._writing.acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_that_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    study = opened(tmp_path)
    assert subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert study.claim(BF16)


def test_workers_that_claim_one_policy_at_once_do_not_both_get_it(tmp_path: Path) -> None:
    studies, at_once = [opened(tmp_path, str(number)) for number in range(4)], Barrier(4)

    def claims(number: int) -> bool:
        at_once.wait(timeout=60)
        return studies[number].claim(BF16)

    for _ in range(10):
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(claims, range(4)))
        assert got.count(True) <= 1
        assert all(study.elsewhere <= {BF16} for study in studies)
        for study in studies:
            study.release(BF16)


@pytest.mark.parametrize(
    ("device", "visible", "lock"),
    [
        ("cuda:0", "", ".lock-cuda-0"),
        ("cuda:1", "", ".lock-cuda-1"),
        (None, "3", ".lock-cuda-3"),
        ("cuda:1", "2,5", ".lock-cuda-5"),
        ("cpu", "3", ".lock-cpu-4"),
    ],
)
def test_tuners_in_one_folder_lock_their_device_alone(
    device: str | None, visible: str, lock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from amptune.search.pipeline import locked

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("amptune.search.pipeline.cores_of_this_process", lambda: [4, 5])
    with locked(tmp_path, device), locked(tmp_path, "cuda:7"):
        assert sorted(one.name for one in tmp_path.iterdir()) == sorted([lock, ".lock-cuda-7"])
        with pytest.raises(StudyError, match="on this device; wait for it"), locked(tmp_path, device):
            pass


def test_a_folder_that_another_device_uses_is_not_removed_with_a_failed_start(tmp_path: Path) -> None:
    from amptune.search.pipeline import locked

    where = tmp_path / "study"
    with pytest.raises(DeviceError), locked(where, "cuda:0"), locked(where, "cuda:1"):
        raise DeviceError("gone")
    assert where.is_dir()


def test_jobs_that_open_a_new_database_at_once_all_get_it(tmp_path: Path) -> None:
    for number in range(3):
        at_once = Barrier(6)

        def open_it(_: int, url: str = f"sqlite:///{tmp_path / str(number)}.db", at_once: Barrier = at_once) -> None:
            at_once.wait(timeout=60)
            database_at(url)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(open_it, range(6)))


def test_the_error_of_a_missing_driver_names_it_once() -> None:
    missing = ImportError("no driver")
    missing.__cause__ = ModuleNotFoundError("No module named 'psycopg'")
    for error, words in ((ImportError("no driver"), "no driver"), (missing, "no driver (No module named 'psycopg')")):
        with pytest.raises(StudyError) as told, storage_errors():
            raise error
        assert words in str(told.value)
        assert ("(" in str(told.value)) == (error is missing)
