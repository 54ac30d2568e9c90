"""Short runs of the user's training loop under a policy, with fresh data at every step, timed by wall clock.

The search times steps over batches that are already on the device. This loop loads and copies batches as training does:
the figures that decide are measured in it.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace

import torch

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.clocks import FEW_STEPS, Stopwatch, stopwatch_for
from amptune.measure.bench.drawn_batches import Batches
from amptune.measure.bench.failures import failure_of
from amptune.measure.bench.step import Stepper
from amptune.measure.bench.stillness import Stillness
from amptune.measure.loop.feed import LoaderFeed
from amptune.measure.results.loop_timing import LoopTiming
from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Outcome
from amptune.policy.settings import Policy
from amptune.workload.user_errors import user_code

__all__ = ["feeding", "loader_has_failed", "measure_in_loop", "run_loop"]


def measure_in_loop(bench: Bench, policy: Policy, effort: Effort, stillness: Stillness | None = None) -> Outcome:
    """Times a block of steps of the user's loop under the policy, from the initial weights.

    Without a loader, new batches are drawn ahead: nobody knows how training gets them. A loader that fails says nothing
    about the policy: the failure's exception is then `LOADER_FAILED`.
    """
    try:
        feed = _feed(bench, policy, effort)
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        return failure_of(error)
    with closing(feed):
        outcome = bench.measure(policy, effort, feed, stillness)
        if isinstance(outcome, Failure):
            return replace(outcome, exception=LOADER_FAILED) if loader_has_failed(feed) else outcome
        waits = bench.workload.loader is not None
        return replace(outcome, in_loop=True, wait_share=feed.wait_share() if waits else 0.0)


def feeding(bench: Bench, policy: Policy, effort: Effort) -> AbstractContextManager[Batches]:
    """Returns a context of the batches that `measure_in_loop` has, or `Bench.measure` if it is not in the loop."""
    return closing(_feed(bench, policy, effort)) if effort.in_loop else nullcontext(bench.sequence(policy, effort))


def loader_has_failed(batches: Batches | None) -> bool:
    """Returns True if batches of the user's loader ended with its own error, which says nothing about the policy."""
    return isinstance(batches, LoaderFeed) and batches.epochs.failed


def _feed(bench: Bench, policy: Policy, effort: Effort) -> LoaderFeed:
    """Returns the feed of the user's loop, over batches that are drawn ahead if there is no loader."""
    size = policy.batch_size or bench.workload.batch_size
    drawn = None if bench.workload.loader is not None else bench.drawn.fresh_sequence(size, effort.batches)
    return LoaderFeed(bench.workload, size, bench.device, stopwatch_for(bench.device), drawn)


def run_loop(bench: Bench, policy: Policy, seconds: float, warmup_s: float = 1.0) -> LoopTiming:
    """Trains for `seconds` over the workload's loader, from the initial weights.

    The warm-up is the first step, with any compiling, and then `warmup_s` more. At least one step is timed; a step or
    batch that has begun is not interrupted. Raises `TargetError` if the loader yields no batches or batches of a wrong
    size, `UserCodeError` for any other error in the loop, including out of memory.
    """
    stopwatch = stopwatch_for(bench.device)
    feed = LoaderFeed(bench.workload, policy.batch_size or bench.workload.batch_size, bench.device, stopwatch)
    try:
        with closing(feed), bench.on_device(policy, feed) as (_, stepper), user_code("the training loop"):
            return _Loop(stepper, feed, stopwatch).timing(bench.device, seconds, warmup_s)
    finally:
        bench.release()


@dataclass(frozen=True, slots=True)
class _Loop:
    step: Stepper
    feed: LoaderFeed
    stopwatch: Stopwatch

    def timing(self, device: torch.device, seconds: float, warmup_s: float) -> LoopTiming:
        self.step()
        self._run(warmup_s)
        self.stopwatch.reset()
        samples, wait_s, start = self.feed.samples, self.feed.wait_s, time.perf_counter()
        steps = self._run(seconds, at_least=1)
        self.stopwatch.mark("step")
        totals_ms = self.stopwatch.totals_ms()
        took_s = time.perf_counter() - start
        copy_ms, step_ms = totals_ms["copy"] / steps, totals_ms["step"] / steps
        samples_per_s = (self.feed.samples - samples) / took_s
        wait_ms = 1000 * (self.feed.wait_s - wait_s) / steps
        host_ms, busy_ms = self._probe(step_ms) if device.type == "cuda" else (step_ms, None)
        return LoopTiming(
            samples_per_s=samples_per_s,
            steps=steps,
            seconds=took_s,
            wait_ms=wait_ms,
            copy_ms=copy_ms,
            step_ms=step_ms,
            idle_ms=max(0.0, 1000 * took_s / steps - copy_ms - step_ms),
            host_ms=host_ms,
            busy_ms=busy_ms,
            pinned=self.feed.pinned if device.type == "cuda" else None,
            source=self.feed.epochs.source,
        )

    def _run(self, seconds: float, *, at_least: int = 0) -> int:
        """Runs steps until the time is over; returns their number."""
        steps, end = 0, time.perf_counter() + seconds
        while steps < at_least or time.perf_counter() < end:
            self.step()
            steps += 1
        return steps

    def _probe(self, step_ms: float) -> tuple[float, float]:
        """Returns (ms the host needs to enqueue a step, ms the device needs for a step that was enqueued ahead).

        Both are medians of up to `FEW_STEPS` within a second, of two at least.
        """
        count = max(2, min(FEW_STEPS, round(1000 / step_ms)))
        host_ms = statistics.median(self._host_ms() for _ in range(count))
        self.feed.hold_ms = 2 * host_ms  # the host is done before the device begins
        return host_ms, statistics.median(self._busy_ms() for _ in range(count))

    def _host_ms(self) -> float:
        self.stopwatch.reset()
        fed_s, start = self.feed.host_s, time.perf_counter()
        self.step()
        return 1000 * (time.perf_counter() - start - (self.feed.host_s - fed_s))

    def _busy_ms(self) -> float:
        """Returns the device's time for a step; the device is held after its batch while the host enqueues the step."""
        self.stopwatch.reset()
        self.step()
        self.stopwatch.mark("step")
        return self.stopwatch.totals_ms()["step"]
