"""Workers that have ended while they held a trial: where their parent has not reaped them, and on other hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_policy_sampler import opened

from amptune.errors import StudyError
from amptune.policy.settings import amp_recipe
from amptune.search.sampler import storage
from amptune.search.sampler.backend import storage_errors
from amptune.search.sampler.leases import _has_ended_here, _place

RECIPE = amp_recipe("bf16")


@pytest.mark.skipif(_place() == "-", reason="process ids mean the same everywhere on Linux alone")
def test_a_process_that_was_not_reaped_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = f"name {_place()} {process.pid}"
        assert not _has_ended_here(owner)
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert _has_ended_here(owner)
    assert _has_ended_here(owner)


def test_one_that_was_killed_between_asking_and_claiming_on_another_host_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "NAMED_S", 0.0)
    other, study = opened(tmp_path), opened(tmp_path)
    other._store._leases.worker = "name elsewhere 1"
    other._ask(RECIPE, None, None)
    suggestion = study.suggest(wanted=RECIPE)
    assert suggestion is not None
    assert suggestion.policy == RECIPE


def test_the_error_of_a_missing_driver_names_it_once() -> None:
    missing = ImportError("no driver")
    missing.__cause__ = ModuleNotFoundError("No module named 'psycopg'")
    for error, words in ((ImportError("no driver"), "no driver"), (missing, "no driver (No module named 'psycopg')")):
        with pytest.raises(StudyError) as told, storage_errors():
            raise error
        assert words in str(told.value)
        assert ("(" in str(told.value)) == (error is missing)
