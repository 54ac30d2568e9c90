"""Whole tunings on a synthetic machine where the truth is known: `reports/replay.py` does the same a thousand times."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TypeVar

import pytest
from simulated.landscape import NO_TROUBLE, WORKLOADS, Replay, Trouble, replay, same_twice

from amptune.search.ratios import Ratio

TUNINGS = 100
BUDGET_S = 1800.0
PROCESSES = 2

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    seed: int
    trouble: Trouble = field(default_factory=Trouble)
    flat: float | None = None
    budget_s: float = BUDGET_S

    @property
    def workload(self) -> str:
        return WORKLOADS[self.seed % len(WORKLOADS)]


def tuned(job: Job) -> Replay:
    with tempfile.TemporaryDirectory() as folder:
        return replay(job.workload, job.seed, job.trouble, budget_s=job.budget_s, folder=Path(folder), flat=job.flat)


def compared_with_itself(job: Job) -> Ratio:
    return same_twice(job.workload, job.seed, job.trouble, budget_s=300.0)


def all_of(work: Callable[[Job], T], jobs: Iterable[Job]) -> list[T]:
    """In processes of their own, whose linear algebra keeps to one thread: there are as many as cores."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, jobs, chunksize=2))


@pytest.fixture(scope="module")
def tunings() -> list[Replay]:
    return all_of(tuned, [Job(seed) for seed in range(TUNINGS)])


def test_the_answer_is_near_the_true_best_of_ten_thousand(tunings: list[Replay]) -> None:
    regrets = sorted(one.regret for one in tunings)
    assert median(regrets) <= 0.02
    assert regrets[int(0.9 * TUNINGS)] <= 0.08
    assert regrets[-1] <= 0.25


def test_a_claimed_interval_holds_the_truth(tunings: list[Replay]) -> None:
    assert sum(one.claim_holds for one in tunings) / TUNINGS >= 0.87


def test_nothing_slower_is_claimed_to_be_faster(tunings: list[Replay]) -> None:
    assert not any(one.claims_falsely for one in tunings)


def test_the_budget_is_kept(tunings: list[Replay]) -> None:
    assert max(one.simulated_s for one in tunings) <= 1.05 * BUDGET_S


def test_where_nothing_is_faster_next_to_nothing_is_claimed() -> None:
    found = all_of(tuned, [Job(seed, flat=(0.0, 0.05)[seed % 2], budget_s=300.0) for seed in range(40)])
    assert sum(one.claim is not None for one in found) <= 4


def test_a_policy_is_as_fast_as_itself() -> None:
    ratios = all_of(compared_with_itself, [Job(seed) for seed in range(300)])
    assert 0.90 <= sum(not ratio.shows_a_difference for ratio in ratios) / 300 <= 0.99


@pytest.mark.parametrize(
    "trouble", [NO_TROUBLE, Trouble(throttlings=3.0), Trouble(oom=0.3)], ids=["none", "throttling", "oom"]
)
def test_each_trouble_by_itself_is_survived(trouble: Trouble) -> None:
    found = all_of(tuned, [Job(seed, trouble) for seed in (1, 2, 3)])
    assert all(one.true_speedup > 1 for one in found)
    assert max(one.regret for one in found) <= 0.25
