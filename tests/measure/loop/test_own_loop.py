"""The user's own loop: real DataLoaders, small modules. No test depends on how fast this machine is."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, product
from typing import Any, NamedTuple

import pytest
import torch
from benches import CPU, measured, step_of
from benches import workload_of as any_workload
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from amptune import Policy, Workload
from amptune.errors import TargetError, UserCodeError
from amptune.measure.bench import clocks
from amptune.measure.bench.bench import Bench
from amptune.measure.loop import feed, own_loop
from amptune.measure.loop.feed import Epochs, LoaderFeed
from amptune.measure.loop.own_loop import measure_in_loop, run_loop
from amptune.measure.results.loop_timing import LoopTiming, limits_of
from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Measurement
from amptune.measure.workers import worker
from amptune.policy.settings import STOCK, amp_recipe

BATCH = 4
# Until a DataLoader's processes have ended; PyTorch itself waits 5 s for each, and goes on.
ENDED_WITHIN_S = 120.0
# Forking from a process with threads is what DataLoader does on Linux until Python 3.14; newer ones warn of it.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Named(NamedTuple):
    features: torch.Tensor
    labels: torch.Tensor


class ScriptedTime:
    """Stands for the `time` module in the loop: its time passes where a test says so."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def batch_in(self, seconds: float) -> Callable[[int], torch.Tensor]:
        def batch(n: int) -> torch.Tensor:
            self.now_s += seconds
            return torch.randn(n, 8)

        return batch

    def endless_in(self, seconds: float) -> Callable[[int], Iterator[torch.Tensor]]:
        return lambda n: (self.batch_in(seconds)(n) for _ in count())


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedTime:
    scripted = ScriptedTime()
    for module in (own_loop, feed, clocks):
        monkeypatch.setattr(module, "time", scripted)
    return scripted


class Steps:
    """A loss that notes its batches' types and sizes, and takes so many seconds of a scripted time."""

    def __init__(self, scripted: ScriptedTime | None = None, seconds: float = 0.0) -> None:
        self.sizes: list[int] = []
        self.types: set[type] = set()
        self.scripted, self.seconds = scripted or ScriptedTime(), seconds

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.scripted.now_s += self.seconds
        features = batch if isinstance(batch, torch.Tensor) else batch[0]
        self.sizes.append(len(features))
        self.types.add(type(batch))
        loss: torch.Tensor = model(features).square().mean()
        return loss


def workload_of(**more: Any) -> Workload:
    return any_workload(lambda: nn.Linear(8, 2), **{"loss": Steps(), **more})


def looped(policy: Policy = STOCK, *, seconds: float = 0.05, **parts: object) -> LoopTiming:
    return run_loop(Bench(workload_of(**parts), CPU), policy, seconds, warmup_s=0.0)


def dataset(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 8))


def test_the_time_of_a_loop_is_that_of_its_batches_and_steps(scripted: ScriptedTime) -> None:
    timing = looped(batch=scripted.batch_in(0.003), loss=Steps(scripted, 0.005), seconds=0.05)
    assert (timing.source, timing.steps) == ("batch", 7)  # the first that end after 50 ms
    assert timing.seconds == pytest.approx(7 * 0.008)
    assert (timing.wall_ms, timing.wait_ms, timing.step_ms) == pytest.approx((8, 3, 5))
    assert (timing.copy_ms, timing.idle_ms) == pytest.approx((0, 3))
    assert (timing.host_ms, timing.busy_ms) == (timing.step_ms, None)
    assert timing.samples_per_s == pytest.approx(BATCH / 0.008)


@pytest.mark.parametrize(
    ("policy", "seconds", "steps", "wait_ms"),
    [(STOCK, 0.01, 1, 20), (STOCK, 0.29, 12, 20), (Policy(accumulate=2), 0.14, 3, 40)],
)
def test_a_slow_loader_is_waited_for_and_the_loop_ends_by_the_clock(
    scripted: ScriptedTime, policy: Policy, seconds: float, steps: int, wait_ms: float
) -> None:
    loss = Steps(scripted, 0.005)
    timing = looped(policy, loader=scripted.endless_in(0.02), loss=loss, seconds=seconds)
    each = policy.accumulate
    assert (timing.source, timing.steps) == ("loader", steps)
    assert len(loss.sizes) == each * (steps + 1)  # and the warm-up's
    assert (timing.wait_ms, timing.wait_share) == pytest.approx((wait_ms, 0.8))
    assert timing.samples_per_s == pytest.approx(each * BATCH * steps / timing.seconds)
    assert timing.input_bound


def test_waiting_is_seen_by_the_real_clock_too() -> None:
    def sleeping(n: int) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.02)
            yield torch.randn(n, 8)

    assert looped(loader=sleeping).wait_ms >= 20


@pytest.mark.parametrize("constant", [Named(torch.ones(BATCH, 8), torch.ones(BATCH)), [torch.ones(BATCH, 8), "a name"]])
def test_constant_batches_arrive_as_they_are(constant: Any) -> None:
    loss = Steps()
    assert looped(batch=lambda _: constant, loss=loss).steps >= 1
    assert loss.types == {type(constant)}


def test_a_step_of_the_users_own_is_looped_too() -> None:
    assert looped(amp_recipe("bf16"), loss=None, step=step_of("backward step zero")).steps >= 1


@pytest.mark.parametrize(
    ("policy", "sizes"), [(STOCK, [4, 4, 1]), (Policy(batch_size=6), [6, 3])], ids=["the workload's", "the policy's"]
)
def test_a_loader_that_ends_begins_again_and_its_last_batch_counts_as_what_it_holds(
    policy: Policy, sizes: list[int]
) -> None:
    loss = Steps()
    timing = looped(policy, loss=loss, loader=lambda n: DataLoader(dataset(9), batch_size=n))
    assert loss.sizes == (sizes * len(loss.sizes))[: len(loss.sizes)]
    assert timing.samples_per_s == pytest.approx(sum(loss.sizes[-timing.steps :]) / timing.seconds)


def test_a_loader_that_is_an_iterator_is_built_again_for_each_epoch() -> None:
    built = []

    def loader(n: int) -> Iterator[torch.Tensor]:
        built.append(n)
        return iter([torch.randn(n, 8), torch.randn(n, 8)])

    epochs = Epochs(workload_of(loader=loader), BATCH, CPU)
    assert [len(next(epochs)) for _ in range(5)] == [BATCH] * 5
    assert built == [BATCH] * 3


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
        assert run_loop(bench, STOCK, 0.1, warmup_s=0.1).steps >= 1
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


def raising_loss(*_: object) -> torch.Tensor:
    raise ValueError("not today")


@FORKS
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"loader": lambda n: DataLoader(Raising(), n)}, r"loader\(4\) raised KeyError: .*no such sample: 0"),
        ({"loader": lambda n: DataLoader(Raising(), n, num_workers=1)}, r"loader\(4\) raised KeyError.*no such sample"),
        ({"loss": raising_loss}, "the training loop raised ValueError: not today"),
    ],
)
def test_what_the_users_loader_or_step_raises_is_told_with_its_place(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(UserCodeError, match=f"(?s){words}") as caught:
        looped(**parts)
    assert "test_own_loop.py" in str(caught.value)
    assert all_processes_end()


ONCE = iter([torch.ones(BATCH, 8)] * 2)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda n: DataLoader(dataset(3), n, drop_last=True), "yields no batch: is its dataset empty, or"),
        (lambda _: 3, "returned int, not what training iterates over"),
        (lambda _: Raising(), "returned Raising, not what training iterates over"),
        (lambda _: [torch.ones(2, 8)] * 3, r"begins with a batch of tensors of shape \[\(2, 8\)\], none of 4 samples"),
        (lambda _: ONCE, "yields no batch after the first 2: it is spent"),
    ],
)
def test_a_loader_that_is_none_is_a_clear_error(loader: Callable[[int], Iterable[Any]], words: str) -> None:
    with pytest.raises(TargetError, match=rf"loader\(4\) {words}"):
        looped(loader=loader, seconds=60.0)


def test_samples_are_counted_along_their_axis_and_batches_without_one_as_whole() -> None:
    timing = looped(
        batch=lambda n: torch.randn(8, n),
        loader=lambda n: [torch.randn(8, n), torch.randn(8, n - 2)],
        loss=lambda model, batch: model(batch.T).square().mean(),
    )
    assert BATCH - 2 <= timing.samples_per_s * timing.seconds / timing.steps <= BATCH

    def packed(n: int) -> torch.Tensor:
        return torch.randn(10 * n, 8)

    timing = looped(batch=packed, loader=lambda n: [packed(n)])
    assert timing.samples_per_s == pytest.approx(BATCH * timing.steps / timing.seconds)


def test_the_loop_leaves_nothing_behind_for_the_next_trial() -> None:
    bench = Bench(workload_of(), CPU)
    before = measured(bench)
    run_loop(bench, amp_recipe("bf16"), 0.01, warmup_s=0.0)
    assert measured(bench).losses[:3] == before.losses[:3]


# 100 steps of 10 ms.
FULL = LoopTiming(samples_per_s=3200, steps=100, seconds=1, wait_ms=0, copy_ms=0, step_ms=10, idle_ms=0, host_ms=2)
WAITING = {"wait_ms": 4.5, "idle_ms": 3.8, "step_ms": 6.2}


@pytest.mark.parametrize(
    ("changes", "code", "share", "said"),
    [
        (WAITING, "input-bound", 0.38, "persistent_workers=True, pin_memory=True, or"),
        (WAITING | {"pinned": None}, "input-bound", 0.38, "persistent_workers=True, or"),
        (WAITING | {"source": "batch"}, "input-bound", 0.38, "the workload has no loader"),
        ({"copy_ms": 1.2, "step_ms": 8.8}, "copy-bound", 0.12, "on a side stream"),
        ({"copy_ms": 1.2, "step_ms": 8.8, "pinned": False}, "copy-bound", 0.12, "DataLoader(pin_memory=True)"),
        ({"idle_ms": 3.0, "step_ms": 7.0}, "host-bound", 0.3, "CUDA graphs"),
        ({"busy_ms": 7.0, "host_ms": 9.8}, "host-bound", 0.3, "CUDA graphs"),
        ({"busy_ms": 1.0, "host_ms": 8.5}, "host-bound", 0.9, "CUDA graphs"),  # faster then than in the loop
        ({"busy_ms": 9.2, "host_ms": 9.5}, "host-bound", 0.08, "CUDA graphs"),
        ({"wait_ms": 7.0}, None, 0.0, ""),  # while the device works it costs nothing
        ({"busy_ms": 9.5, "host_ms": 2.0}, None, 0.0, ""),  # the device's clock was higher for a few steps
        ({"busy_ms": 8.5, "host_ms": 8.5}, None, 0.0, ""),  # neither waits as far as one can tell
    ],
)
def test_what_limits_a_loop_is_said_with_its_share_and_what_helps(
    changes: dict[str, Any], code: str | None, share: float, said: str
) -> None:
    timing = replace(FULL, **changes)
    found = [(finding.code, finding.figures["share"]) for finding in limits_of(timing)]
    assert found == ([] if code is None else [(code, pytest.approx(share))])
    assert timing.input_bound == (code == "input-bound")
    assert all(said in str(finding) for finding in limits_of(timing))


# --- on a GPU ---------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_gpu(seconds: float = 1.0, policy: Policy = STOCK, **parts: object) -> LoopTiming:
    bench = Bench(any_workload(**{"model": lambda: nn.Linear(8, 2), "loss": Steps(), **parts}), torch.device("cuda", 0))  # type: ignore[arg-type]
    return run_loop(bench, policy, seconds)


@pytest.mark.parametrize("policy", [STOCK, Policy(accumulate=2)])
@pytest.mark.gpu
@needs_gpu
def test_a_large_step_keeps_the_gpu_at_work(policy: Policy) -> None:
    held = torch.randn(1024, 4096).pin_memory()
    timing = on_gpu(
        policy=policy, model=lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))), batch_size=1024,
        batch=lambda n: torch.randn(n, 4096), loader=lambda _: [held],
    )  # fmt: skip
    assert timing.pinned
    assert timing.copy_ms + timing.step_ms > 0.95 * timing.wall_ms
    assert timing.host_ms < timing.step_ms
    assert timing.busy_ms == pytest.approx(timing.step_ms, rel=0.1)
    assert timing.host_share == 0


@pytest.mark.gpu
@needs_gpu
def test_many_tiny_kernels_are_host_bound() -> None:
    timing = on_gpu(model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(100))))
    assert timing.busy_ms is not None
    assert timing.busy_ms < timing.step_ms
    assert timing.host_share > 0.1


@pytest.mark.gpu
@needs_gpu
def test_pageable_batches_are_copy_bound_and_known_as_such() -> None:
    held = torch.randn(4096, 8192)
    timing = on_gpu(model=lambda: nn.Linear(8192, 8), batch_size=4096, batch=lambda _: held, loader=lambda _: [held])
    assert not timing.pinned
    assert timing.copy_share > 0.3


@pytest.mark.gpu
@needs_gpu
def test_fresh_batches_are_pinned_on_a_gpu_and_keep_their_type() -> None:
    loss = Steps()
    timing = on_gpu(seconds=0.1, batch=lambda n: Named(torch.randn(n, 8), torch.randn(n)), loss=loss)
    assert timing.pinned
    assert loss.types == {Named}


@pytest.mark.gpu
@needs_gpu
def test_batches_made_on_the_gpu_need_no_copy() -> None:
    timing = on_gpu(seconds=0.1, batch=lambda n: torch.randn(n, 8, device="cuda"))
    assert timing.steps >= 1


# --- a turn of the loop -----------------------------------------------------------------------------------------------

TURN = Effort(warmup_s=0.0, measure_s=0.1, precision=-1.0, min_steps=6, max_steps=20, in_loop=True)


def turn(**parts: object) -> Measurement:
    outcome = measure_in_loop(Bench(workload_of(**parts), CPU), STOCK, TURN)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def test_a_turn_of_the_loop_pays_for_waiting_and_says_how_much(scripted: ScriptedTime) -> None:
    outcome = turn(loader=scripted.endless_in(0.02), loss=Steps(scripted, 0.005))
    assert outcome.in_loop
    assert outcome.mean_ms == pytest.approx(25.0)
    assert outcome.wait_share == pytest.approx(0.8, abs=0.03)  # the last step is not over


def test_without_a_loader_drawing_a_batch_is_not_timed_and_no_time_blamed_on_one(
    scripted: ScriptedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy CPU takes some time even for batches that lie ready."""
    monkeypatch.setattr(LoaderFeed, "wait_share", lambda _: 0.1)
    outcome = turn(batch=scripted.batch_in(0.02), loss=Steps(scripted, 0.005))
    assert outcome.mean_ms == pytest.approx(5.0)
    assert outcome.wait_share == 0.0


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


def breaking_loader(n: int) -> Iterator[torch.Tensor]:
    yield torch.randn(n, 8)
    raise FileNotFoundError("train.csv")


@pytest.mark.parametrize(
    ("parts", "exception", "words"),
    [({"loader": breaking_loader}, LOADER_FAILED, "train.csv"), ({"loss": raising_loss}, "ValueError", "not today")],
)
def test_a_loader_that_fails_is_told_from_a_policy_that_fails(
    parts: dict[str, object], exception: str, words: str
) -> None:
    outcome = measure_in_loop(Bench(workload_of(**parts), CPU), STOCK, TURN)
    assert isinstance(outcome, Failure)
    assert outcome.exception == exception
    assert words in outcome.message
