"""Settings of the user's DataLoader, tried in the training loop under the policy that was chosen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from amptune.errors import AmptuneError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.clocks import finish
from amptune.measure.bench.step import Stepper
from amptune.measure.loop.own_loop import feed_of
from amptune.measure.results.loop_timing import WORTH_SAYING, LoaderTrial, pays
from amptune.measure.results.outcome import Effort
from amptune.policy.settings import Loader, Policy
from amptune.runtime.script.loaders import DatasetMark, settings_of

__all__ = ["try_loaders"]

# A setting is timed for so many seconds, once what lay ready at its beginning is used up.
LOADER_S = 2.0


def try_loaders(bench: Bench, policy: Policy, seconds: float, most_workers: int) -> tuple[LoaderTrial, ...]:
    """Times steps of the user's loop with its loader as it is, then with other settings while these are better.

    There are at most so many worker processes. The first trial is the loader's own, and so is the last if any was
    better: what warmed up meanwhile is no gain. A loader that fails ends it, with its `error`. Returns nothing for what
    iterates over no DataLoader.
    """
    until_s = time.monotonic() + seconds
    with closing(_Feeds(bench, policy)) as feeds, bench.on_device(policy, feeds) as (_, stepper):
        loader = feeds.data_loader
        if loader is None:
            return ()
        own, mark, began_s = settings_of(loader), DatasetMark(loader.dataset), time.monotonic()
        trials = [_timed(bench, feeds, stepper, own)]
        changes = own.num_workers == 0 and mark != DatasetMark(loader.dataset)
        keeps_workers = changes or isinstance(loader.dataset, IterableDataset)
        best, took_s = trials[0], time.monotonic() - began_s
        for settings in _others(own, pinned=bench.device.type == "cuda", most=0 if keeps_workers else most_workers):
            if best.error or best.wait_share < WORTH_SAYING or time.monotonic() + 2 * took_s > until_s:
                break
            feeds.begin(settings)
            found = _timed(bench, feeds, stepper, settings)
            trials.append(found)
            if not pays(found, best.step_ms):
                break
            best = found
        if best is not trials[0]:
            feeds.begin(own)
            trials.append(_timed(bench, feeds, stepper, own))
    return tuple(trials)


def _others(own: Loader, *, pinned: bool, most: int) -> Iterator[Loader]:
    """Yields settings, each with more of what may help than the one before; none with more than `most` workers."""
    kept = replace(own, pin_memory=pinned or own.pin_memory, persistent_workers=own.num_workers > 0)
    workers = own.num_workers
    if workers >= most:
        yield from () if kept == own else (kept,)
        return
    while workers < most:
        workers = min(most, 2 * max(1, workers))
        yield replace(kept, num_workers=workers, persistent_workers=True)
    ahead = 2 * (own.prefetch_factor or 2)
    yield replace(kept, num_workers=workers, persistent_workers=True, prefetch_factor=ahead)


def _timed(bench: Bench, feeds: _Feeds, stepper: Stepper, settings: Loader) -> LoaderTrial:
    """Times steps once what lay ready at the beginning is used up."""
    try:
        for _ in range(2 + 2 * settings.num_workers * (settings.prefetch_factor or 2)):
            stepper()
        finish(bench.device)
        feeds.begin_block()
        steps, start_s = 0, time.perf_counter()
        while steps < 2 or time.perf_counter() - start_s < LOADER_S:
            stepper()
            steps += 1
        finish(bench.device)
        step_ms = 1000 * (time.perf_counter() - start_s) / steps
        return LoaderTrial(settings=settings, step_ms=step_ms, wait_share=feeds.wait_share())
    except (AmptuneError, RuntimeError, OSError) as error:  # no more processes or shared memory, or CUDA in a fork
        return LoaderTrial(settings=settings, error=str(error) or type(error).__name__)


class _Feeds(Iterator[Any]):
    """The feed of the user's loop, which each `begin` replaces by one whose loader has other settings."""

    def __init__(self, bench: Bench, policy: Policy) -> None:
        self._bench, self._policy = bench, policy
        self._feed = feed_of(bench, policy, Effort())

    @property
    def data_loader(self) -> DataLoader[Any] | None:
        return self._feed.epochs.data_loader

    def begin(self, settings: Loader) -> None:
        """Ends the loader that runs, and begins one with these settings."""
        self._feed.close()
        self._feed = feed_of(self._bench, replace(self._policy, loader=settings), Effort())

    def begin_block(self) -> None:
        self._feed.begin_block()

    def wait_share(self) -> float:
        return self._feed.wait_share()

    def __next__(self) -> Any:
        return next(self._feed)

    def close(self) -> None:
        self._feed.close()
