"""The user's own loop: real DataLoaders, small modules. No test depends on how fast this machine is."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from itertools import count, islice, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from benches import CPU
from benches import workload_of as any_workload
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from amptune import Policy, Workload
from amptune.errors import TargetError, UserCodeError
from amptune.measure.bench import clocks
from amptune.measure.bench.bench import Bench
from amptune.measure.loop.feed import Epochs, LoaderFeed
from amptune.measure.loop.input_checks import require_sound_input
from amptune.measure.loop.own_loop import measure_in_loop
from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Measurement
from amptune.measure.workers import worker
from amptune.policy.settings import STOCK

BATCH = 4
# Until a DataLoader's processes have ended; PyTorch itself waits 5 s for each, and goes on.
ENDED_WITHIN_S = 120.0
# Forking from a process with threads is what DataLoader does on Linux until Python 3.14; newer ones warn of it.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Named(NamedTuple):
    features: torch.Tensor
    labels: torch.Tensor


class Steps:
    """A loss that notes its batches' types and sizes."""

    def __init__(self) -> None:
        self.seen: list[tuple[type, int]] = []

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        features = batch if isinstance(batch, torch.Tensor) else batch[0]
        self.seen.append((type(batch), len(features)))
        return model(features).square().mean()


def workload_of(**more: Any) -> Workload:
    return any_workload(lambda: nn.Linear(8, 2), **{"loss": Steps(), **more})


TURN = Effort(warmup_s=0.0, measure_s=0.1, precision=-1.0, min_steps=6, max_steps=20, in_loop=True)


def turn(policy: Policy = STOCK, device: torch.device = CPU, **parts: object) -> Measurement:
    outcome = measure_in_loop(Bench(workload_of(**parts), device), policy, TURN)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def dataset(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 8))


def test_constant_batches_arrive_as_they_are() -> None:
    for constant in (Named(torch.ones(BATCH, 8), torch.ones(BATCH)), [torch.ones(BATCH, 8), "a name"]):
        loss = Steps()
        turn(batch=lambda _: constant, loss=loss)  # noqa: B023  # it is called before the next one
        assert {kind for kind, _ in loss.seen} == {type(constant)}


@pytest.mark.parametrize(
    ("policy", "sizes"), [(STOCK, [4, 4, 1]), (Policy(batch_size=6), [6, 3])], ids=["the workload's", "the policy's"]
)
def test_a_loader_that_ends_begins_again(policy: Policy, sizes: list[int]) -> None:
    loss = Steps()
    turn(policy, loss=loss, loader=lambda n: DataLoader(dataset(9), batch_size=n))
    assert [size for _, size in loss.seen] == (sizes * len(loss.seen))[: len(loss.seen)]


def all_processes_end() -> bool:
    """Whether a DataLoader's processes end; one that nobody told to goes on for ever."""
    until_s = time.monotonic() + ENDED_WITHIN_S
    while multiprocessing.active_children() and time.monotonic() < until_s:
        time.sleep(0.01)
    return not multiprocessing.active_children()


def _collated(batch: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sample for (sample,) in batch])


@FORKS
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_feed_the_loop_over_several_epochs_and_end_with_it(persistent: bool) -> None:
    kept: DataLoader[Any] = DataLoader(
        dataset(3 * BATCH), BATCH, num_workers=1, persistent_workers=persistent, collate_fn=_collated
    )
    bench = Bench(workload_of(loader=lambda _: kept), CPU)
    for _ in range(2):  # the user's module keeps the loader, and so it must still work the second time
        assert isinstance(measure_in_loop(bench, STOCK, TURN), Measurement)
        assert all_processes_end()
    epochs = Epochs(bench.workload, BATCH, CPU)
    assert [len(next(epochs)) for _ in range(7)] == [BATCH] * 7
    epochs.close()
    assert all_processes_end()


class Raising(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError(f"no such sample: {index}")


def feed_of(**parts: object) -> LoaderFeed:
    workload = workload_of(**parts)
    return LoaderFeed(workload, BATCH, CPU, clocks.stopwatch_for(CPU), [workload.batch(BATCH)])


@FORKS
def test_what_the_users_loader_raises_is_told_with_its_place() -> None:
    loader = lambda n: DataLoader(Raising(), n, num_workers=1)  # noqa: E731
    words = r"(?s)loader\(4\) raised KeyError.*no such sample"
    with pytest.raises(UserCodeError, match=words) as caught, closing(feed_of(loader=loader)) as fed:
        next(fed)
    assert "test_own_loop.py" in str(caught.value)
    assert all_processes_end()


def test_a_batch_is_drawn_once_to_know_the_size_of_a_loaders() -> None:
    """Drawing one may take seconds."""
    drawn: list[int] = []

    def batch(n: int) -> torch.Tensor:
        drawn.append(n)
        return torch.randn(n, 8)

    bench = Bench(workload_of(batch=batch, loader=lambda n: DataLoader(dataset(8 * n), n, collate_fn=_collated)), CPU)
    bench.drawn.sequence(BATCH)
    before = len(drawn)
    require_sound_input(bench)
    assert len(drawn) == before
    for _ in range(2):
        assert isinstance(measure_in_loop(bench, STOCK, TURN), Measurement)
    assert len(drawn) <= before + 1


ONCE = iter([torch.ones(BATCH, 8)] * 2)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda n: DataLoader(dataset(3), n, drop_last=True), "yields no batch: is its dataset empty, or"),
        (lambda _: Raising(), "returned Raising, not what training iterates over"),
        (lambda _: [torch.ones(2, 8)] * 3, r"begins with a batch of tensors of shape \[\(2, 8\)\], none of 4 samples"),
        (lambda _: ONCE, "yields no batch after the first 2: it is spent"),
    ],
)
def test_a_loader_that_is_none_is_a_clear_error(loader: Callable[[int], Iterable[Any]], words: str) -> None:
    with pytest.raises(TargetError, match=rf"loader\(4\) {words}"), closing(feed_of(loader=loader)) as fed:
        list(islice(fed, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_keep_their_type_on_a_gpu_and_those_made_there_need_no_copy() -> None:
    loss, gpu = Steps(), torch.device("cuda", 0)
    turn(device=gpu, batch=lambda n: Named(torch.randn(n, 8), torch.randn(n)), loss=loss)
    assert {kind for kind, _ in loss.seen} == {Named}
    turn(device=gpu, batch=lambda n: torch.randn(n, 8, device="cuda"))


@pytest.mark.parametrize(
    ("accumulate", "loads", "mean_ms", "wait_share"),
    [(1, True, 25.0, 0.8), (2, True, 50.0, 0.8), (1, False, 5.0, 0.0)],
)
def test_a_turn_pays_for_waiting_for_a_loader_and_says_how_much_but_not_for_drawing_batches(
    accumulate: int, loads: bool, mean_ms: float, wait_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def after(seconds: float, value: torch.Tensor) -> torch.Tensor:
        nonlocal now_s
        now_s += seconds
        return value

    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now_s))
    if not loads:  # a busy CPU takes some time even for batches that lie ready
        monkeypatch.setattr(LoaderFeed, "wait_share", lambda _: 0.1)

    def batch(n: int) -> torch.Tensor:
        return after(0.02, torch.randn(n, 8))

    parts: dict[str, Any] = {"loader": lambda n: (batch(n) for _ in count())} if loads else {"batch": batch}
    loss = lambda model, batch: after(0.005, model(batch).square().mean())  # noqa: E731
    outcome = turn(Policy(accumulate=accumulate), loss=loss, **parts)
    assert outcome.in_loop
    assert outcome.mean_ms == pytest.approx(mean_ms)
    assert outcome.wait_share == pytest.approx(wait_share, abs=0.03)  # the last step is not over


def test_the_batches_of_turns_are_others_than_the_searchs_and_drawn_once_while_it_gets_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def batch(n: int) -> torch.Tensor:
        calls.append(n)
        return torch.randn(n, 8)

    bench = Bench(workload_of(batch=batch), CPU)
    monkeypatch.setattr(worker._State, "bench", bench)
    assert worker.get_ready(STOCK, 1, 6) is None
    assert len(calls) == 6
    for _ in range(2):
        assert isinstance(measure_in_loop(bench, STOCK, replace(TURN, batches=6)), Measurement)
    assert len(calls) == 6
    drawn = bench.drawn
    fresh, again = drawn.fresh_sequence(BATCH, 4), drawn.fresh_sequence(BATCH, 4)
    assert all(torch.equal(one, other) for one, other in zip(fresh, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in product(fresh, drawn.sequence(BATCH, 4)))


def failing(*_: object) -> Any:
    raise FileNotFoundError("train.csv")


@pytest.mark.parametrize(("part", "exception"), [("loader", LOADER_FAILED), ("loss", "FileNotFoundError")])
def test_a_loader_that_fails_is_told_from_a_policy_that_fails(part: str, exception: str) -> None:
    outcome = measure_in_loop(Bench(workload_of(**{part: failing}), CPU), STOCK, TURN)
    assert isinstance(outcome, Failure)
    assert outcome.exception == exception
    assert "train.csv" in outcome.message
