"""Settings of DataLoaders: kept apart from the loader that has them, and tried in the loop while they pay."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from benches import CPU
from benches import workload_of as any_workload
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from amptune import Policy, Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.loop import loader_trials
from amptune.measure.loop.loader_trials import try_loaders
from amptune.measure.results.loop_timing import LoaderGain, LoaderTrial, loader_gain
from amptune.policy.settings import STOCK, Loader
from amptune.runtime.script.loaders import DatasetMark, like, settings_of

BATCH = 4
# Forking from a process with threads is what DataLoader does on Linux until Python 3.14; newer ones warn of it.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
ONE, TWO, FOUR = (Loader(num_workers=count, persistent_workers=True) for count in (1, 2, 4))


class Rows(Dataset[torch.Tensor]):
    def __init__(self, waits_s: float = 0.0, *, counts: bool = False, breaks: bool = False) -> None:
        self.waits_s, self.counts, self.breaks, self.seen = waits_s, counts, breaks, 0

    def __len__(self) -> int:
        return 400

    def __getitem__(self, at: int) -> torch.Tensor:
        if self.breaks and torch.utils.data.get_worker_info() is not None:
            raise ValueError("no such file")
        self.seen += self.counts
        time.sleep(self.waits_s)
        return torch.full((8,), float(at))


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            time.sleep(0.003)
            yield torch.ones(8)


class OwnLoader(DataLoader[Any]):
    """A user's class, which gives each batch twice."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


def bench_of(dataset: Any, **options: Any) -> Bench:
    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(dataset, size, **options)

    workload: Workload = any_workload(
        lambda: nn.Linear(8, 2),
        batch=lambda n: torch.ones(n, 8),
        batch_size=BATCH,
        loader=loader,
        loss=lambda model, batch: model(batch).square().mean(),
    )
    return Bench(workload, CPU)


def test_a_loader_with_other_settings_gives_the_same_batches_and_the_first_one_stays() -> None:
    own = OwnLoader(Rows(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    other = like(own, TWO)
    assert (settings_of(own), settings_of(other), type(other)) == (
        Loader(),
        Loader(num_workers=2, persistent_workers=True, prefetch_factor=2),
        OwnLoader,
    )
    first = [batch.tolist() for batch in own]
    own.generator.manual_seed(0)
    assert [batch.tolist() for batch in other] == first
    assert len(first) == 2 * 400 / BATCH


@pytest.mark.parametrize("workers", [0, 2])
def test_data_without_an_index_keeps_its_number_of_processes_or_it_would_come_twice(workers: int) -> None:
    own = DataLoader(Endless(), BATCH, num_workers=workers)
    assert settings_of(like(own, FOUR)).num_workers == workers


def test_a_dataset_that_changes_as_it_is_read_or_written_to_is_known_by_its_mark() -> None:
    dataset = torch.utils.data.Subset(Rows(counts=True), [0, 1])
    before = DatasetMark(dataset)
    assert DatasetMark(dataset) == before
    dataset[0]
    assert DatasetMark(dataset) != before
    tensors = torch.utils.data.TensorDataset(torch.ones(3))
    tensors.replay = torch.ones(3)  # type: ignore[attr-defined]
    before = DatasetMark(tensors)
    tensors.replay[0] = 2  # type: ignore[attr-defined]
    assert DatasetMark(tensors) != before


@FORKS
def test_more_processes_are_tried_while_they_pay_and_the_first_settings_again_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader_trials, "LOADER_S", 0.2)
    trials = try_loaders(bench_of(Rows(0.004)), STOCK, 60.0, 4)
    assert [one.settings for one in (trials[0], trials[-1])] == [Loader()] * 2
    assert trials[1].settings == TWO
    assert trials[0].wait_share > 0.5
    gain = loader_gain(trials)
    assert gain is not None
    assert gain.step_ms < 0.8 * trials[0].step_ms


@pytest.mark.parametrize(
    ("own", "most", "counts"),
    [
        (Loader(), 1, [1, 1]),
        (Loader(), 6, [2, 4, 6, 6]),
        (Loader(num_workers=3), 16, [6, 12, 16, 16]),
        (Loader(num_workers=8), 4, [8]),  # kept between epochs
        (Loader(), 0, []),
    ],
)
def test_processes_double_up_to_the_cores_and_then_prefetch_more(own: Loader, most: int, counts: list[int]) -> None:
    others = list(loader_trials._others(own, pinned=False, most=most))
    assert [one.num_workers for one in others] == counts
    assert [one.prefetch_factor for one in others if one.prefetch_factor] == ([4] if len(counts) > 1 else [])


@FORKS
@pytest.mark.parametrize(
    ("dataset", "tried"),
    [(Rows(0.002, counts=True), 1), (Endless(), 1), (Rows(0.002, breaks=True), 2), (Rows(), 1)],
    ids=["changes", "no index", "breaks in a process", "loop does not wait"],
)
def test_what_cannot_be_read_by_processes_keeps_its_settings(
    dataset: Any, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_trials, "LOADER_S", 0.2)
    monkeypatch.setattr(loader_trials, "WORTH_SAYING", 0.9 if isinstance(dataset, Rows) and not dataset.waits_s else 0)
    trials = try_loaders(bench_of(dataset), STOCK, 60.0, 4)
    assert len(trials) == tried
    assert loader_gain(trials) is None
    assert ["no such file" in one.error for one in trials[1:]] == [True] * (tried - 1)


def test_a_list_of_batches_has_no_settings() -> None:
    workload = any_workload(
        lambda: nn.Linear(8, 2),
        batch=lambda n: torch.ones(n, 8),
        batch_size=BATCH,
        loader=lambda n: [torch.ones(n, 8)],
        loss=lambda model, batch: model(batch).square().mean(),
    )
    assert try_loaders(Bench(workload, CPU), STOCK, 10.0, 4) == ()


@FORKS
def test_a_policys_loader_is_what_the_loop_is_timed_with() -> None:
    dataset = Rows(0.002, breaks=True)
    (first, *_) = try_loaders(bench_of(dataset), Policy(loader=TWO), 10.0, 4)
    assert "no such file" in first.error


@pytest.mark.parametrize(
    ("times_ms", "gain"),
    [
        ([(Loader(), 10.0), (TWO, 5.0), (FOUR, 4.0), (Loader(), 9.0)], (FOUR, 9.0, 4.0)),
        ([(Loader(), 10.0), (TWO, 9.2)], None),
        ([(Loader(), 10.0), (TWO, 5.0), (Loader(), 5.1)], None),  # it was the machine that became faster
        ([(Loader(), 10.0)], None),
        ([], None),
    ],
)
def test_a_gain_is_beside_the_faster_of_the_first_settings_trials(times_ms: Any, gain: Any) -> None:
    trials = [LoaderTrial(settings=settings, step_ms=ms) for settings, ms in times_ms]
    found = loader_gain(trials)
    expected = None if gain is None else LoaderGain(settings=gain[0], own_ms=gain[1], step_ms=gain[2], wait_share=0.0)
    assert found == expected
