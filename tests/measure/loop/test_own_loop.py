"""The user's own loop: real DataLoaders, small modules. No test depends on how fast this machine is."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from alike import trained_alike
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

CPU = torch.device("cpu")
BATCH = 4
# Until a DataLoader's processes have ended; PyTorch itself waits 5 s for each, and goes on.
ENDED_WITHIN_S = 120.0
# Forking from a process with threads is what DataLoader does on Linux until Python 3.14; newer ones warn of it.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Named(NamedTuple):
    features: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Pair:
    features: torch.Tensor
    labels: torch.Tensor


class ScriptedTime:
    """Stands for the `time` module in the loop: its time passes where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedTime:
    scripted = ScriptedTime()
    for module in (own_loop, feed, clocks):
        monkeypatch.setattr(module, "time", scripted)
    return scripted


class Steps:
    """A loss that counts its batches and remembers their sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        features = batch if isinstance(batch, torch.Tensor) else batch[0]
        self.sizes.append(len(features))
        loss: torch.Tensor = model(features).square().mean()
        return loss


def workload_of(**more: object) -> Workload:
    parts: dict[str, object] = {
        "model": lambda: nn.Linear(8, 2),
        "batch": lambda n: torch.randn(n, 8),
        "loss": Steps(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        "batch_size": BATCH,
    }
    return Workload(**{**parts, **more})  # type: ignore[arg-type]  # parts by name


def looped(policy: Policy = STOCK, *, seconds: float = 0.05, **parts: object) -> LoopTiming:
    return run_loop(Bench(workload_of(**parts), CPU), policy, seconds, warmup_s=0.0)


def dataset(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 8))


def batch_in(scripted: ScriptedTime, seconds: float) -> Callable[[int], torch.Tensor]:
    def batch(n: int) -> torch.Tensor:
        scripted.now_s += seconds
        return torch.randn(n, 8)

    return batch


def endless_in(scripted: ScriptedTime, seconds: float) -> Callable[[int], Iterator[torch.Tensor]]:
    def loader(n: int) -> Iterator[torch.Tensor]:
        while True:
            yield batch_in(scripted, seconds)(n)

    return loader


class StepsIn(Steps):
    """A step of such a loss takes so long."""

    def __init__(self, scripted: ScriptedTime, seconds: float) -> None:
        super().__init__()
        self.scripted, self.seconds = scripted, seconds

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.scripted.now_s += self.seconds
        return super().__call__(model, batch)


def test_a_loop_over_fresh_batches_is_timed_by_the_wall_clock() -> None:
    timing = looped()
    assert timing.source == "batch"
    assert timing.seconds >= 0.05
    assert timing.steps >= 1
    assert timing.samples_per_s == pytest.approx(BATCH * timing.steps / timing.seconds)
    assert timing.wait_ms > 0
    assert timing.step_ms > 0
    assert timing.host_ms == timing.step_ms
    assert timing.busy_ms is None


def test_the_time_of_a_loop_is_that_of_its_batches_and_steps(scripted: ScriptedTime) -> None:
    timing = looped(batch=batch_in(scripted, 0.003), loss=StepsIn(scripted, 0.005), seconds=0.05)
    assert timing.steps == 7  # the first that end after 50 ms
    assert timing.seconds == pytest.approx(7 * 0.008)
    assert (timing.wall_ms, timing.wait_ms, timing.step_ms) == pytest.approx((8, 3, 5))
    assert (timing.copy_ms, timing.idle_ms) == pytest.approx((0, 3))


@pytest.mark.parametrize(
    "constant",
    [
        torch.ones(BATCH, 8),
        (torch.ones(BATCH, 8), torch.ones(BATCH)),
        Named(torch.ones(BATCH, 8), torch.ones(BATCH)),
        [torch.ones(BATCH, 8), "a name"],
    ],
)
def test_constant_batches_arrive_as_they_are(constant: Any) -> None:
    seen = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(type(batch))
        return Steps()(model, batch)

    assert looped(batch=lambda _: constant, loss=loss).steps >= 1
    assert set(seen) == {type(constant)}


def test_batches_may_be_dataclasses() -> None:
    timing = looped(
        batch=lambda n: Pair(torch.randn(n, 8), torch.randint(2, (n,))),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch.features), batch.labels),
    )
    assert timing.steps >= 1


def test_a_step_of_the_users_own_is_looped_too() -> None:
    def step(tuned: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        with tuned.autocast():
            loss: torch.Tensor = model(tuned.batch(batch)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    assert looped(amp_recipe("bf16"), loss=None, step=step).steps >= 1


def test_a_loader_that_is_slow_is_the_limit(scripted: ScriptedTime) -> None:
    timing = looped(loader=endless_in(scripted, 0.02), loss=StepsIn(scripted, 0.005), seconds=0.3)
    assert timing.source == "loader"
    assert timing.wait_ms == pytest.approx(20)
    assert timing.wait_share == pytest.approx(0.8)
    assert timing.input_bound
    findings = list(limits_of(timing))
    assert [finding.code for finding in findings][:1] == ["input-bound"]


def test_waiting_is_seen_by_the_real_clock_too() -> None:
    def sleeping(n: int) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.02)
            yield torch.randn(n, 8)

    assert looped(loader=sleeping).wait_ms >= 20


def test_the_loop_ends_by_the_clock_though_each_batch_takes_long(scripted: ScriptedTime) -> None:
    timing = looped(loader=endless_in(scripted, 0.2), seconds=0.01)
    assert timing.steps == 1
    assert timing.seconds == pytest.approx(0.2)


def test_accumulation_takes_several_batches_to_a_step(scripted: ScriptedTime) -> None:
    steps = Steps()
    timing = looped(Policy(accumulate=2), loss=steps, seconds=0.1, loader=endless_in(scripted, 0.02))
    assert timing.steps == 3
    assert len(steps.sizes) == 2 * (timing.steps + 1)  # and the warm-up's
    assert timing.wait_ms == pytest.approx(40)
    assert timing.samples_per_s == pytest.approx(2 * BATCH * timing.steps / timing.seconds)


def test_the_policys_batch_size_is_what_the_loader_is_called_with() -> None:
    steps = Steps()
    looped(Policy(batch_size=6), loss=steps, loader=lambda n: DataLoader(dataset(60), batch_size=n))
    assert set(steps.sizes) == {6}


def test_a_loader_that_ends_begins_again_and_its_last_batch_counts_as_what_it_holds() -> None:
    steps = Steps()
    timing = looped(loss=steps, loader=lambda n: DataLoader(dataset(9), batch_size=n), seconds=0.1)
    assert steps.sizes == ([4, 4, 1] * len(steps.sizes))[: len(steps.sizes)]
    counted = sum(steps.sizes[-timing.steps :])
    assert timing.samples_per_s == pytest.approx(counted / timing.seconds)


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
    steps = Steps()
    kept: DataLoader[Any] = DataLoader(
        dataset(3 * BATCH), BATCH, num_workers=1, persistent_workers=persistent, collate_fn=_collated
    )
    bench = Bench(workload_of(loss=steps, loader=lambda _: kept), CPU)
    for _ in range(2):  # the user's module keeps the loader, and so it must still work the second time
        timing = run_loop(bench, STOCK, 0.1, warmup_s=0.1)
        assert timing.steps >= 1
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


def test_a_loader_that_raises_is_the_users_error_with_its_place() -> None:
    with pytest.raises(
        UserCodeError, match=r"loader\(4\) raised KeyError: 'no such sample: 0' \(.*test_own_loop.py:\d+"
    ):
        looped(loader=lambda n: DataLoader(Raising(), batch_size=n))


@FORKS
def test_a_worker_process_that_raises_names_the_users_file_too() -> None:
    with pytest.raises(UserCodeError, match=r"(?s)loader\(4\) raised KeyError.*test_own_loop.py.*no such sample"):
        looped(loader=lambda n: DataLoader(Raising(), batch_size=n, num_workers=1))
    assert all_processes_end()


def test_a_step_that_raises_is_the_users_error() -> None:
    def loss(*_: object) -> torch.Tensor:
        raise ValueError("not today")

    with pytest.raises(UserCodeError, match=r"the training loop raised ValueError: not today \(.*test_own_loop.py"):
        looped(loss=loss)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda n: DataLoader(dataset(3), n, drop_last=True), r"loader\(4\) yields no batch: is its dataset empty, or"),
        (lambda _: 3, r"loader\(4\) returned int, not what training iterates over, such as a DataLoader"),
        (lambda _: Raising(), r"loader\(4\) returned Raising, not what training iterates over"),
        (lambda _: [torch.ones(2, 8)] * 3, r"begins with a batch of tensors of shape \[\(2, 8\)\], none of 4 samples"),
    ],
)
def test_a_loader_that_is_none_is_a_clear_error(loader: Callable[[int], Iterable[Any]], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        looped(loader=loader)


def test_an_iterator_that_cannot_be_built_again_is_a_clear_error() -> None:
    once = iter([torch.ones(BATCH, 8)] * 2)
    with pytest.raises(TargetError, match=r"loader\(4\) yields no batch after the first 2: it is spent"):
        looped(loader=lambda _: once, seconds=60.0)


def test_batches_whose_samples_lie_along_another_axis_are_counted() -> None:
    timing = looped(
        batch=lambda n: torch.randn(8, n),
        loader=lambda n: [torch.randn(8, n), torch.randn(8, n - 2)],
        loss=lambda model, batch: model(batch.T).square().mean(),
    )
    a_batch = timing.samples_per_s * timing.seconds / timing.steps
    assert BATCH - 2 <= a_batch <= BATCH


def test_batches_without_an_axis_of_samples_count_as_whole() -> None:
    def packed(n: int) -> torch.Tensor:
        return torch.randn(10 * n, 8)

    timing = looped(batch=packed, loader=lambda n: [packed(n)])
    assert timing.samples_per_s == pytest.approx(BATCH * timing.steps / timing.seconds)


def test_the_loop_leaves_nothing_behind_for_the_next_trial() -> None:
    bench = Bench(workload_of(), CPU)
    quick = Effort(warmup_s=0.0, measure_s=0.0, min_steps=1)
    before = bench.measure(STOCK, quick)
    run_loop(bench, amp_recipe("bf16"), 0.01, warmup_s=0.0)
    after = bench.measure(STOCK, quick)
    assert isinstance(before, Measurement)
    assert isinstance(after, Measurement)
    assert trained_alike(before, after)


# 100 steps of 10 ms.
FULL = LoopTiming(samples_per_s=3200, steps=100, seconds=1, wait_ms=0, copy_ms=0, step_ms=10, idle_ms=0, host_ms=2)


def reason_of(**changes: Any) -> tuple[str, str]:
    [finding] = limits_of(replace(FULL, **changes))
    return finding.code, str(finding)


def test_waiting_that_the_device_must_share_is_input_bound() -> None:
    code, words = reason_of(wait_ms=4.5, idle_ms=3.8, step_ms=6.2)
    assert code == "input-bound"
    assert "waiting for the loader takes 38% of the loop's time, which no faster step wins back" in words
    assert "DataLoader workers, persistent_workers=True, pin_memory=True, or" in words
    _, words = reason_of(wait_ms=4.5, idle_ms=3.8, step_ms=6.2, pinned=None)
    assert "DataLoader workers, persistent_workers=True, or" in words


def test_waiting_for_batch_asks_for_a_loader() -> None:
    code, words = reason_of(wait_ms=4.5, idle_ms=3.8, step_ms=6.2, source="batch")
    assert code == "input-bound"
    assert "the workload has no loader" in words


def test_waiting_while_the_device_works_costs_nothing() -> None:
    timing = replace(FULL, wait_ms=7)
    assert not timing.input_bound
    assert list(limits_of(timing)) == []


@pytest.mark.parametrize(("pinned", "advice"), [(True, "on a side stream"), (False, "DataLoader(pin_memory=True)")])
def test_copying_is_named_with_what_helps(pinned: bool, advice: str) -> None:
    code, words = reason_of(copy_ms=1.2, step_ms=8.8, pinned=pinned)
    assert code == "copy-bound"
    assert "copying batches to the device takes 12% of the loop's time" in words
    assert advice in words


@pytest.mark.parametrize(
    "changes", [{"idle_ms": 3.0, "step_ms": 7.0}, {"step_ms": 10.0, "busy_ms": 7.0, "host_ms": 9.8}]
)
def test_a_device_that_idles_though_its_batch_is_there_waits_for_the_host(changes: dict[str, float]) -> None:
    code, words = reason_of(**changes)
    assert code == "host-bound"
    assert "nothing to do for 30% of the loop's time although its batch is there" in words
    assert "CUDA graphs" in words


def test_a_host_that_is_ahead_is_not_the_limit_though_the_probe_ran_at_a_higher_clock() -> None:
    timing = replace(FULL, busy_ms=9.5, host_ms=2.0)
    assert timing.host_share == 0


def on_gpu(seconds: float = 1.0, policy: Policy = STOCK, **parts: object) -> LoopTiming:
    return run_loop(Bench(workload_of(**parts), torch.device("cuda", 0)), policy, seconds)


@pytest.mark.parametrize("policy", [STOCK, Policy(accumulate=2)])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


@pytest.mark.parametrize(
    ("host_ms", "busy_ms", "share"),
    [
        (8.5, 1.0, 0.9),  # the host was faster at that moment than in the loop, and far behind the device all the same
        (9.5, 9.2, 0.08),
        (2.0, 9.8, 0.0),  # the device's clock was higher for a few steps
        (8.5, 8.5, 0.0),  # neither waits for the other as far as one can tell
    ],
)
def test_a_host_that_needs_longer_than_the_device_keeps_it_waiting(
    host_ms: float, busy_ms: float, share: float
) -> None:
    timing = replace(FULL, host_ms=host_ms, busy_ms=busy_ms)
    assert timing.host_share == pytest.approx(share)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_many_tiny_kernels_are_host_bound() -> None:
    timing = on_gpu(model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(100))))
    assert timing.busy_ms is not None
    assert timing.busy_ms < timing.step_ms
    assert timing.host_share > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pageable_batches_are_copy_bound_and_known_as_such() -> None:
    held = torch.randn(4096, 8192)
    timing = on_gpu(model=lambda: nn.Linear(8192, 8), batch_size=4096, batch=lambda _: held, loader=lambda _: [held])
    assert not timing.pinned
    assert timing.copy_share > 0.3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fresh_batches_are_pinned_on_a_gpu_and_keep_their_type() -> None:
    seen = []

    def loss(model: nn.Module, batch: Named) -> torch.Tensor:
        seen.append(type(batch))
        return Steps()(model, batch)

    timing = on_gpu(seconds=0.1, batch=lambda n: Named(torch.randn(n, 8), torch.randn(n)), loss=loss)
    assert timing.pinned
    assert set(seen) == {Named}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_made_on_the_gpu_need_no_copy() -> None:
    timing = on_gpu(seconds=0.1, batch=lambda n: torch.randn(n, 8, device="cuda"))
    assert timing.steps >= 1


# --- a turn of the loop -----------------------------------------------------------------------------------------------

TURN = Effort(warmup_s=0.0, measure_s=0.1, precision=-1.0, min_steps=6, max_steps=20, in_loop=True)


def turn(**parts: object) -> Measurement | Failure:
    return measure_in_loop(Bench(workload_of(**parts), CPU), STOCK, TURN)


def test_a_turn_of_the_loop_pays_for_waiting_and_says_how_much(scripted: ScriptedTime) -> None:
    outcome = turn(loader=endless_in(scripted, 0.02), loss=StepsIn(scripted, 0.005))
    assert isinstance(outcome, Measurement)
    assert outcome.in_loop
    assert outcome.mean_ms == pytest.approx(25.0)
    assert outcome.wait_share == pytest.approx(0.8, abs=0.03)  # the last step is not over


def test_without_a_loader_drawing_a_batch_is_not_timed(scripted: ScriptedTime) -> None:
    outcome = turn(batch=batch_in(scripted, 0.02), loss=StepsIn(scripted, 0.005))
    assert isinstance(outcome, Measurement)
    assert outcome.mean_ms == pytest.approx(5.0)
    assert outcome.wait_share == 0.0


def test_without_a_loader_no_time_is_blamed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy CPU takes some time even for batches that lie ready."""
    monkeypatch.setattr(LoaderFeed, "wait_share", lambda _: 0.1)
    outcome = turn()
    assert isinstance(outcome, Measurement)
    assert outcome.wait_share == 0.0


def test_the_batches_of_a_turn_are_others_than_those_of_the_search() -> None:
    drawn = Bench(workload_of(), CPU).drawn
    fresh, again = drawn.fresh_sequence(BATCH, 4), drawn.fresh_sequence(BATCH, 4)
    assert all(torch.equal(one, other) for one, other in zip(fresh, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in product(fresh, drawn.sequence(BATCH, 4)))


def test_the_batches_of_turns_are_drawn_once_in_a_process_while_it_gets_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0

    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal drawn
        drawn += 1
        return torch.randn(n, 8), torch.randint(4, (n,))

    bench = Bench(workload_of(batch=batch), CPU)
    monkeypatch.setattr(worker._State, "bench", bench)
    assert worker.get_ready(STOCK, 1, 6) is None
    assert drawn == 6
    for _ in range(2):
        assert isinstance(measure_in_loop(bench, STOCK, replace(TURN, batches=6)), Measurement)
    assert drawn == 6


def test_a_loader_that_fails_is_told_from_a_policy_that_fails() -> None:
    def loader(n: int) -> Iterator[torch.Tensor]:
        yield torch.randn(n, 8)
        raise FileNotFoundError("train.csv")

    outcome = turn(loader=loader)
    assert isinstance(outcome, Failure)
    assert outcome.exception == LOADER_FAILED
    assert "train.csv" in outcome.message

    def loss(*_: object) -> torch.Tensor:
        raise ValueError("no loss")

    failed = turn(loss=loss)
    assert isinstance(failed, Failure)
    assert failed.exception == "ValueError"
