"""The study: the trials so far with their outcomes, and the claims of the workers that share it."""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from amptune.errors import StudyError
from amptune.measure.results.half_effects import Sensitivity
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.sampler.catalog import Catalog, History, ToPolicy
from amptune.search.sampler.policy_sampler import PolicySampler, Sampler
from amptune.search.sampler.records import TuningRecord
from amptune.search.sampler.storage import Store, open_store
from amptune.search.space.knobs import Space
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["Study", "open_study"]

# A worker that finds another at the same work looks again after as long, on average.
AGAIN_S = 0.05


class Study:
    """The trials so far, of tuning runs of any objective, and of other workers that use the same storage now.

    A trial is used if it failed or has the figure that this `objective` needs; any other is one of the rows.
    """

    history: History
    """The trials so far, as a value."""
    lost: StudyError | None = None
    """The first error by which the storage lost a record that this run goes on without."""
    rows: tuple[Row, ...]
    """The timings that are no trials, of all runs."""
    run = ""
    """The tuning run that uses the study, from `begin` on."""

    def __init__(
        self, store: Store, catalog: Catalog, objective: Objective, baseline: Policy | None, sampler: Sampler | None
    ) -> None:
        self._store, self._given = store, sampler
        self._sensed: dict[str, Sensitivity] = {}
        self.rows = ()
        self.history = History(catalog, (), objective, baseline)
        self._use(catalog)
        self._read()

    def _use(self, catalog: Catalog) -> None:
        self.history = replace(self.history, catalog=catalog)
        self._sampler = PolicySampler(self._given, catalog.space) if self._given is not None else None

    def _read(self) -> None:
        """Adds the trials and rows of other runs."""
        objective = self.history.objective
        for trial in self._store.new_trials():
            if self.run and trial.run == self.run:
                continue
            if isinstance(trial.outcome, Failure) or objective.score(trial.outcome) is not None:
                self._add(replace(trial, number=len(self.trials)))
            else:
                self.rows += (trial.row,)
        self.rows += tuple(self._store.new_rows())

    def _add(self, trial: Trial) -> None:
        self.history = replace(self.history, trials=(*self.trials, trial))

    @property
    def trials(self) -> Sequence[Trial]:
        """The trials that tell something, as they ended."""
        return self.history.trials

    def begin(self, tuning: TuningRecord) -> None:
        """Records that a tuning run uses the study from now on, and says to other workers that this one lives."""
        self.run = tuning.run
        self._store.keep("tuning", tuning.run, tuning)
        with self._store.access():
            self._store.claims.begin()

    def end(self, timeline: Sequence[Mapping[str, Any]]) -> None:
        """Records what this run did when, and gives back its claims; a failing storage loses that."""
        with self._losing(), self._store.access():
            self._store.claims.end()
            self._store.keep("timeline", self.run, tuple(timeline))

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Goes on if the storage fails, and remembers that."""
        try:
            yield
        except StudyError as error:
            self.lost = self.lost or error

    def claim(self, policy: Policy) -> bool:
        """Says to other workers that this one compiles or measures a policy; False if another does, or has measured it.

        The baseline is measured by every worker: nothing works without it.
        """
        if policy == self.history.baseline:
            return True
        known = self.history.latest.get(policy)
        with self._store.access():
            is_mine = self._store.claims.take(policy)
        self._read()  # after the claims: another worker stores a trial before it gives back the claim
        if is_mine and self.history.latest.get(policy) is not known:
            self.release(policy)
            return False
        return is_mine

    def release(self, policy: Policy) -> None:
        """Gives back a claim, so that others may measure the policy."""
        with self._store.access():
            self._store.claims.give_back(policy)

    @property
    def elsewhere(self) -> frozenset[Policy]:
        """The policies that other living workers have claimed, read from the storage."""
        with self._store.access():
            claimed = self._store.claims.others()
        return frozenset(one for one in claimed if not isinstance(one, str) and one != self.history.baseline)

    def suggested(self, besides: Collection[Policy]) -> Policy | None:
        """Returns what the user's sampler proposes that is neither measured nor `besides`.

        Returns None without such a sampler, and if all that it proposes is taken.
        """
        if self._sampler is None:
            return None
        return self._sampler.next(self.history, {*besides, *self.elsewhere})

    def tell(self, trial: Trial) -> None:
        """Adds a trial and stores it, unless the worker was killed from outside: the next run tries the policy."""
        self._add(trial)  # first, so that a storage that fails now does not lose it
        if not (isinstance(trial.outcome, Failure) and trial.outcome.kind == "killed"):
            self._store.add(trial, self.history.catalog.points.get(trial.policy))
        self.release(trial.policy)

    def reconsider(self, policy: Policy) -> None:
        """Forgets a failure: on a busy machine it may have been chance, and nothing works without a baseline."""
        trial = self.history.latest.get(policy)
        if trial is not None and isinstance(trial.outcome, Failure):
            self.history = replace(self.history, trials=tuple(one for one in self.trials if one != trial))

    def add(self, row: Row) -> None:
        """Adds a timing that is no trial; a storage that fails loses it for later runs alone."""
        self.rows += (row,)
        with self._losing():
            self._store.keep("row", uuid.uuid4().hex, row)

    def keep(self, judgement: Judgement) -> None:
        """Records the numerics gate's judgement of a policy; a storage that fails loses it for later runs alone."""
        with self._losing():
            name = hashlib.sha256(str(judgement.policy).encode()).hexdigest()
            self._store.keep("judged", name, judgement)

    def catch_up(self) -> None:
        """Adds what other workers have measured meanwhile; a storage that fails adds nothing."""
        with suppress(StudyError):
            self._read()

    @property
    def sensed(self) -> dict[str, Sensitivity]:
        """The times of modules that count for all workers of this study, by entry; they stay once they are there."""
        with suppress(StudyError):
            self._sensed = {**self._store.sensed(), **self._sensed}
        return self._sensed

    def keep_sensed(self, entry: str, sensitivity: Sensitivity) -> Sensitivity:
        """Records the times of modules, and returns those that count: another worker's if it was faster.

        The order of modules gives a study's parameters their meaning, which is one for all workers. A storage that
        fails loses the times for later runs alone.
        """
        claim = f"{entry} is sensed"
        with self._losing(), self._store.access():
            while not self._store.claims.take(claim):
                time.sleep(2 * AGAIN_S * random.random())  # noqa: S311  # no secret
            if entry not in self.sensed:
                self._store.keep("sensed", entry, sensitivity)
            self._store.claims.give_back(claim)
        self._sensed = {entry: sensitivity, **self.sensed}
        return self._sensed[entry]

    def adopt(self, space: Space, to_policy: ToPolicy) -> None:
        """Goes on with the policies of another space, or other policies of its points; trials are kept."""
        self._use(Catalog(space, to_policy))


def open_study(
    where: Path | str,
    name: str,
    space: Space,
    to_policy: ToPolicy,
    *,
    objective: Objective = THROUGHPUT,
    baseline: Policy | None = None,
    sampler: Sampler | None = None,
    left_s: Callable[[], float] = lambda: 0.0,
) -> Study:
    """Opens or resumes a study: `where` is a folder (a journal file in it) or a database URL.

    Every `objective` uses the same study.
    A database that is away is waited for while the run has time left, which `left_s` returns.
    Raises `StudyError` if the storage cannot be used.
    """
    store = open_store(where, name, space, left_s)
    return Study(store, Catalog(space, to_policy), objective, baseline, sampler)
