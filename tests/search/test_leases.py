"""Workers of one study die, are given up, and come back too late."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
from killed_workers import POSTGRESQL, killed, postgresql
from test_policy_sampler import opened

from amptune.measure.results.outcome import Failure
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.plan.budget import Budget
from amptune.search.request import TuningRequest
from amptune.search.sampler.backend import database_at
from amptune.search.sampler.leases import GONE_S, Leases
from amptune.search.sampler.study import Study
from amptune.search.sampler.suggestion import Suggestion
from amptune.search.space.candidates import Wanted
from amptune.search.table.trial import Trial

RECIPE = amp_recipe("bf16")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def leases_of(study: Study) -> Leases:
    leases = study._store._leases
    assert leases is not None
    return leases


def asked(study: Study) -> Suggestion:
    suggestion = study.suggest(wanted=RECIPE)
    assert suggestion is not None
    return suggestion


def trial(policy: Policy, run: str) -> Trial:
    return Trial(number=0, policy=policy, outcome=Failure(kind="oom", message=""), seconds=1.0, run=run)


def test_a_trial_is_tried_again_once_its_workers_counter_stands_still(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    first, second = opened(url), opened(url)
    clock = Clock()
    leases_of(second).clock = clock
    early = asked(first)
    assert early.policy == RECIPE
    for _ in range(3):  # it takes longer than a worker is waited for, but lives
        leases_of(first).beat()
        other = asked(second)
        assert other.policy != RECIPE
        second.forget(other)
        clock.now_s += GONE_S - 1
    clock.now_s += 2
    again = asked(second)
    assert again.policy == RECIPE
    second.tell(again, trial(RECIPE, "second"))
    first.tell(early, trial(RECIPE, "first"))
    first.forget(early)
    assert [one.run for one in opened(url).trials] == ["second"]


def test_a_worker_counts_on_until_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amptune.search.sampler.leases.BEAT_S", 0.01)
    leases = leases_of(opened(f"sqlite:///{tmp_path / 'study.db'}"))
    leases.begin()
    while leases._beats < 3:
        pass
    leases.end()
    assert leases.study.user_attrs[f"alive {leases.worker}"] >= 2


def test_a_folder_is_one_workers_and_needs_no_lease(tmp_path: Path) -> None:
    assert opened(tmp_path)._store._leases is None


@pytest.mark.parametrize(
    ("device", "visible", "lock"),
    [
        ("cuda:0", "", ".lock-cuda-0"),
        ("cuda:1", "", ".lock-cuda-1"),
        (None, "3", ".lock-cuda-3"),
        ("cuda:1", "2,5", ".lock-cuda-5"),
        ("cpu", "3", ".lock-cpu-0"),
    ],
)
def test_tuners_of_a_shared_study_lock_their_device_alone(
    device: str | None, visible: str, lock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    wanted = Wanted(baseline=STOCK, pins={})
    one = TuningRequest(
        source=Source(target="a.py:b"), wanted=wanted, budget=Budget(seconds=1.0), folder=tmp_path, study="sqlite://",
        device=device,
    )  # fmt: skip
    assert one.lock == lock
    assert replace(one, study=tmp_path).lock == ".lock"


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sqlite", "postgresql"])
def test_killed_workers_lose_nothing_that_was_told(tmp_path: Path, storage: str) -> None:
    if storage == "sqlite":
        left = killed(f"sqlite:///{tmp_path / 'study.db'}", 5, workers=2)
    elif POSTGRESQL is None or importlib.util.find_spec("psycopg2") is None:
        pytest.skip("needs PostgreSQL and psycopg2")
    else:
        with postgresql(tmp_path) as url:
            left = killed(url, 5, workers=2)
    assert left.told > 0
    assert (left.lost, left.twice, left.running) == (0, 0, 0)


def test_jobs_that_open_a_new_database_at_once_all_get_it(tmp_path: Path) -> None:
    for number in range(3):
        at_once = Barrier(6)

        def open_it(_: int, url: str = f"sqlite:///{tmp_path / str(number)}.db", at_once: Barrier = at_once) -> None:
            at_once.wait(timeout=60)
            database_at(url)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(open_it, range(6)))
