"""Short runs of the user's training loop under a policy, with fresh data at every step, timed by wall clock.

The search times steps over batches that are already on the device. This loop loads and copies batches as training does:
the figures that decide are measured in it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.clocks import stopwatch_for
from amptune.measure.bench.drawn_batches import Batches
from amptune.measure.bench.failures import failure_of
from amptune.measure.bench.stillness import Stillness
from amptune.measure.loop.feed import LoaderFeed
from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Outcome
from amptune.policy.settings import Policy

__all__ = ["feed_of", "feeding", "loader_has_failed", "measure_in_loop"]


def measure_in_loop(bench: Bench, policy: Policy, effort: Effort, stillness: Stillness | None = None) -> Outcome:
    """Times a block of steps of the user's loop under the policy, from the initial weights.

    Without a loader, new batches are drawn ahead: nobody knows how training gets them. A loader that fails says nothing
    about the policy: the failure's exception is then `LOADER_FAILED`.
    """
    try:
        feed = feed_of(bench, policy, effort)
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
    return closing(feed_of(bench, policy, effort)) if effort.in_loop else nullcontext(bench.sequence(policy, effort))


def loader_has_failed(batches: Batches | None) -> bool:
    """Returns True if batches of the user's loader ended with its own error, which says nothing about the policy."""
    return isinstance(batches, LoaderFeed) and batches.epochs.failed


def feed_of(bench: Bench, policy: Policy, effort: Effort) -> LoaderFeed:
    """Returns the feed of the user's loop, over batches that are drawn ahead if there is no loader."""
    size = policy.batch_size or bench.workload.batch_size
    has_loader = bench.workload.loader is not None
    drawn = bench.drawn.batches(size, 1) if has_loader else bench.drawn.fresh_sequence(size, effort.batches)
    return LoaderFeed(bench.workload, size, bench.device, stopwatch_for(bench.device), drawn, policy.loader)
