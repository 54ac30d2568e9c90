"""Long training in the user's own loop, for loss curves that are compared with FP32's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.drawn_batches import seed_everything
from amptune.measure.loop.feed import Epochs
from amptune.measure.numerics.batches import MOST_COMPARED, Feed
from amptune.measure.numerics.short_training import Training
from amptune.measure.results.training_runs import LossCurve
from amptune.policy.settings import Policy

__all__ = ["train_long"]


def train_long(bench: Bench, policy: Policy, steps: int, seed: int, seconds: float) -> LossCurve:
    """Trains from the initial weights for `steps`, or until `seconds` are over; returns the loss curve.

    Each step takes a new batch of the workload's own size: from its loader, else from `batch`. Data order and random
    numbers follow from `seed` alone, so that they are the same under every policy. Raises `NonFiniteError`, and
    whatever the workload raises.
    """
    feed = _LoopFeed(bench)
    until_s = time.monotonic() + seconds
    try:
        with Training.over(feed, bench, policy) as training:
            return training.curve(feed.places(steps, seed, until_s), seed)
    finally:
        feed.forget()


class _LoopFeed(Feed):
    """A feed of the user's loop: `at` is the number of the step, and each step has a new batch."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(batches=[], spread="batches", device=bench.device)
        self._bench = bench
        self._epochs = self._begun()
        self._held: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return MOST_COMPARED  # the steps in which the loss scale settles, as in the gate

    def __next__(self) -> Any:
        """Returns the batch of this step: a step that the loss scaler skipped is repeated on the same one."""
        if self._held is None or self._held[0] != self.at:
            self._held = (self.at, next(self._epochs))
        return self._moved(self._held[1])

    def places(self, steps: int, seed: int, until_s: float) -> Iterator[int]:
        """Yields the numbers of the steps of one run, at least one, until the time is over.

        Each step is seeded: what an earlier step drew, and how, changes none of its random numbers.
        """
        self.forget()
        self._epochs = self._begun()
        for place in range(steps):
            if place and time.monotonic() > until_s:
                return
            seed_everything(int(np.random.SeedSequence((seed, place)).generate_state(1)[0]))
            yield place

    def forget(self) -> None:
        """Ends the loader's worker processes, and frees the device's memory."""
        self._held = None
        self._epochs.close()

    def _begun(self) -> Epochs:
        return Epochs(self._bench.workload, self._bench.workload.batch_size, self._bench.device)
