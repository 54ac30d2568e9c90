"""Workers of one study die, are given up, and come back too late."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from test_policy_sampler import opened

from amptune.errors import DeviceError, StudyError
from amptune.policy.settings import amp_recipe
from amptune.search.pipeline import locked
from amptune.search.sampler.backend import database_at
from amptune.search.sampler.study import Study
from amptune.search.sampler.suggestion import Suggestion

TESTS = Path(__file__).resolve().parents[1]
RECIPE = amp_recipe("bf16")


def asked(study: Study) -> Suggestion:
    suggestion = study.suggest(wanted=RECIPE)
    assert suggestion is not None
    return suggestion


# A worker that begins a trial and never ends it.
BEGINS = """
import sys
sys.path[:0] = sys.argv[1:]
import time
from pathlib import Path
from amptune.policy.settings import amp_recipe
from test_policy_sampler import opened
study = opened(Path("study"))
study._store.join()
study.suggest(wanted=amp_recipe("bf16"))
print("begun", flush=True)
time.sleep(600)
"""


def test_a_killed_workers_trial_is_tried_again_at_once_on_its_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGINS, *map(str, (TESTS, TESTS / "search")), *sys.path]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"begun\n"
        study = opened(tmp_path / "study")
        other = asked(study)
        assert other.policy != RECIPE
        worker.kill()
    assert asked(study).policy == RECIPE


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
    assert asked(study).policy == RECIPE


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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("amptune.search.pipeline.cores_of_this_process", lambda: [4, 5])
    with locked(tmp_path, device), locked(tmp_path, "cuda:7"):
        assert sorted(one.name for one in tmp_path.iterdir()) == sorted([lock, ".lock-cuda-7"])
        with pytest.raises(StudyError, match="on this device; wait for it"), locked(tmp_path, device):
            pass


def test_a_folder_that_another_device_uses_is_not_removed_with_a_failed_start(tmp_path: Path) -> None:
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
