"""The study: the trials so far with their outcomes, and what to try next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from amptune.errors import StudyError
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import CompileMode, Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.sampler.backend import TrialGivenUpError
from amptune.search.sampler.catalog import Catalog, History, ToPolicy
from amptune.search.sampler.neighbours import neighbours_of
from amptune.search.sampler.policy_sampler import PolicySampler, Sampler, with_fixed
from amptune.search.sampler.records import TuningRecord
from amptune.search.sampler.storage import Handle, Store, open_store
from amptune.search.sampler.suggestion import Suggestion
from amptune.search.space.knobs import Space
from amptune.search.table.objective import THROUGHPUT, Objective, Yardstick
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["Study", "open_study"]

# A foreign sampler may propose so many policies in turn that were measured or are none.
MOST_ASKED = 20
# So many workers can be faster in turn, or have enqueued what was measured since.
MOST_ATTEMPTS = 200


class Study:
    """The trials so far and a sampler of the next one. Every outcome is stored before the next policy is asked for.

    The trials come from tuning runs of any objective, and from other workers that use the same storage now. A trial is
    used if it failed or has the figure that this `objective` needs. `sampler` proposes policies; by default amptune's.
    `history` is the trials so far as a value.
    """

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        seed: int,
        objective: Objective = THROUGHPUT,
        baseline: Policy | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._store, self._catalog, self._seed = store, catalog, seed
        self._objective, self._baseline = objective, baseline
        self._proposer = catalog.proposer(seed)
        self._given = sampler
        self._first: deque[Policy] = deque()
        self._left_out: set[int] = set()
        self.run = ""
        self.lost: StudyError | None = None
        """The first error by which the storage lost a record that this run goes on without."""
        known = store.trials()
        self._numbers = {trial.number for trial in known}
        self.trials: list[Trial] = list(filter(self._tells, known))
        self._rows = [*(trial.row for trial in known if not self._tells(trial)), *store.rows()]
        self.history = self._history_of(self.trials)

    def __contains__(self, policy: Policy) -> bool:
        """Returns True if the space holds a policy, measured or not."""
        return policy in self._catalog.points

    @property
    def size(self) -> int:
        """The number of different policies in the space."""
        return len(self._catalog.policies)

    @property
    def measured(self) -> int:
        """The number of trials of this run; other workers have runs of their own."""
        return sum(trial.run == self.run for trial in self.trials)

    def trial_of(self, policy: Policy) -> Trial | None:
        return self.history.latest.get(policy)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The timings that are no trials, of all runs."""
        return tuple(self._rows)

    @property
    def yardstick(self) -> Yardstick:
        """The yardstick that trials are compared by, with the baseline's measurement if it is known."""
        return self.history.yardstick

    def _history_of(self, trials: Collection[Trial]) -> History:
        return History(self._catalog, tuple(trials), self._objective, self._baseline)

    def _history_that_tells(self, trials: Collection[Trial]) -> History:
        return self._history_of(list(filter(self._tells, trials)))

    def _tells(self, trial: Trial) -> bool:
        """Returns True if a trial can be scored by the objective, or failed."""
        return isinstance(trial.outcome, Failure) or self._objective.score(trial.outcome) is not None

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.history = self._history_of(self.trials)

    def leave_out(self, which: Callable[[Policy], bool]) -> None:
        """Excludes these policies from all suggestions."""
        self._left_out |= {index for policy, index in self._catalog.index.items() if which(policy)}
        self._first = deque(policy for policy in self._first if not which(policy))

    def leave_nothing_out(self) -> None:
        """Ends all exclusions."""
        self._left_out.clear()

    def next_smaller(self, policy: Policy) -> Policy | None:
        """Returns the policy with the next smaller batch size of the space, if there is one."""
        return self._catalog.next_smaller(policy)

    @property
    def has_left_out(self) -> bool:
        """True if an exclusion kept any policy from being measured."""
        return any(self._catalog.policies[index] not in self.history.latest for index in self._excluded)

    @property
    def _excluded(self) -> set[int]:
        return self._left_out | self.history.too_large()

    def begin(self, tuning: TuningRecord) -> None:
        """Records that a tuning run uses the study from now on."""
        self.run = tuning.run
        self._store.note_tuning(tuning)
        self._store.join()

    def end(self, timeline: Sequence[Mapping[str, Any]]) -> None:
        """Records what this run did when, and that it begins no more trials; a failing storage loses that."""
        self._store.leave()
        with self._losing():
            self._store.note_timeline(self.run, timeline)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Goes on if the storage fails, and remembers that."""
        try:
            yield
        except StudyError as error:
            self.lost = self.lost or error

    def add(self, row: Row) -> None:
        """Adds a timing that is no trial; a storage that fails loses it for later runs alone."""
        self._rows.append(row)
        with self._losing():
            self._store.note_row(row)

    def catch_up(self) -> None:
        """Adds what other workers have measured meanwhile; a storage that fails adds nothing."""
        with suppress(StudyError):
            self._catch_up_trials()
            known = set(self._rows)
            self._rows += [row for row in self._store.rows() if row.run != self.run and row not in known]

    def _catch_up_trials(self) -> None:
        for trial in self._store.trials(besides=self._numbers):
            self._numbers.add(trial.number)
            if self._tells(trial):
                self._add(replace(trial, number=len(self.trials)))
            else:
                self._rows.append(trial.row)

    @property
    def table(self) -> list[Row]:
        """Every timing of all runs: the trials' and the others."""
        return [*(trial.row for trial in self.trials), *self._rows]

    def keep(self, judgement: Judgement) -> None:
        """Records the numerics gate's judgement of a policy; a storage that fails loses it for later runs alone."""
        with self._losing():
            self._store.note_judged(judgement)

    def measure_first(self, policies: Iterable[Policy]) -> None:
        """Puts these policies first, including those outside the space."""
        self._first.extend(policies)

    def suggest(
        self, *, wanted: Policy | None = None, modes: Collection[CompileMode] | None = None
    ) -> Suggestion | None:
        """Returns the next unmeasured policy, in one of these modes of torch.compile; None if all such are measured.

        A `wanted` policy is suggested if it is free, and else what was put first. Policies that another worker is
        measuring are skipped. What a foreign sampler proposes may have been measured, or be no policy of the space:
        after some of those it is amptune's own sampler that proposes. Raises `StudyError` if the storage never returns
        what it was asked for.
        """
        for attempt in range(MOST_ATTEMPTS):
            with suppress(TrialGivenUpError):  # the next is this worker's again
                self._store.give_up_what_nobody_has()
                self._catch_up_trials()
                asked = self._next_wanted(modes) if wanted is None or not self.is_free(wanted) else wanted
                given = None if attempt >= MOST_ASKED else self._given
                handle, own = self._ask(asked, modes, given)
                proposal = own.proposal if asked is None and given is None else None
                policy = self._catalog.policy_of(handle.params) if handle.params else asked
                is_open = policy is not None and self._is_open(policy, asked, modes)
                if policy is not None and is_open and (self._store.claim(handle, policy) or policy == self._baseline):
                    self._catch_up_trials()  # another worker may have been faster
                    if policy not in self.history.latest:
                        if proposal is None:
                            return Suggestion(policy, handle)
                        return Suggestion(policy, handle, proposal.gain, proposal.least, proposal.seconds)
                self._store.forget(handle)
                if proposal is None and asked is None and given is None and not own.was_enqueued:
                    return None
        raise StudyError(f"the study gave none of the policies that it was asked for, {MOST_ATTEMPTS} times")

    def has_wanted(self, modes: Collection[CompileMode]) -> bool:
        """Returns True if a policy that was put first, in one of these modes of torch.compile, is not measured yet."""
        return self._next_wanted(modes) is not None

    def is_free(self, policy: Policy) -> bool:
        """Returns True if a policy is neither measured, nor being measured, nor known not to fit.

        The baseline is measured though another worker, perhaps a killed one, has begun it: nothing works without it.
        """
        fits = self._catalog.index.get(policy) not in self.history.too_large()
        is_begun = policy != self._baseline and policy in self._store.running()
        return policy not in self.history.latest and fits and not is_begun

    def _next_wanted(self, modes: Collection[CompileMode] | None) -> Policy | None:
        """Returns the first free policy of those that were put first, in one of these modes."""
        self._first = deque(policy for policy in self._first if self.is_free(policy))
        excluded = self._excluded
        open_ones = (one for one in self._first if self._catalog.index.get(one) not in excluded)
        return next((policy for policy in open_ones if modes is None or policy.compile in modes), None)

    def _ask(
        self, wanted: Policy | None, modes: Collection[CompileMode] | None, given: Sampler | None
    ) -> tuple[Handle, PolicySampler]:
        """Begins a trial of the wanted policy, of one that a worker enqueued, or of what a sampler proposes."""
        point = self._catalog.points.get(wanted) if wanted is not None else None
        if point is not None:
            self._store.enqueue(point)
        others = set() if modes is None else self._catalog.not_in(modes)
        basis = self._store.distributions, self._catalog, self._history_that_tells, self._proposer
        own = PolicySampler(*basis, self._excluded | others, is_idle=wanted is not None)
        fixed = {"compile": next(iter(modes))} if modes and len(modes) == 1 and self._catalog.has_modes else {}
        proposes = own if wanted is not None or given is None else with_fixed(given, fixed)
        handle = self._store.ask(proposes)
        if wanted is None or point is not None or own.was_enqueued:
            self._store.settle(handle)
        return handle, own

    def _is_open(self, policy: Policy, wanted: Policy | None, modes: Collection[CompileMode] | None) -> bool:
        is_excluded = policy != wanted and self._catalog.index.get(policy) in self._excluded
        in_mode = policy == wanted or modes is None or policy.compile in modes
        return policy not in self.history.latest and in_mode and not is_excluded

    def neighbours(self, policy: Policy) -> list[Policy]:
        """Returns the policies one step from a policy that may be better, the most promising first."""
        return neighbours_of(policy, self.history, self._proposer.belief(self.history.seen()))

    def adopt(self, space: Space, to_policy: ToPolicy, fits: Callable[[Policy], bool] = lambda _: True) -> None:
        """Goes on with the policies of another space, or other policies of its points; trials are kept."""
        self._catalog = Catalog(space, to_policy, fits)
        self._proposer = self._catalog.proposer(self._seed)
        self.history = self._history_of(self.trials)

    def reconsider(self, policy: Policy) -> None:
        """Forgets a failure: on a busy machine it may have been chance, and nothing works without a baseline."""
        trial = self.history.latest.get(policy)
        if trial is not None and isinstance(trial.outcome, Failure):
            self.trials.remove(trial)
            self.history = self._history_of(self.trials)

    def tell(self, suggestion: Suggestion, trial: Trial) -> None:
        """Adds an outcome and stores it, unless the worker was killed from outside: the next run tries the policy."""
        self._numbers.add(suggestion.handle.number)
        self._add(trial)  # first, so that a storage that fails now does not lose it
        if isinstance(trial.outcome, Failure) and trial.outcome.kind == "killed":
            self._store.forget(suggestion.handle)
        else:
            self._store.tell(suggestion.handle, trial)

    def forget(self, suggestion: Suggestion) -> None:
        """Leaves a suggestion unmeasured, so that it can be asked for again."""
        self._store.forget(suggestion.handle)


def open_study(
    where: Path | str,
    name: str,
    space: Space,
    to_policy: ToPolicy,
    *,
    seed: int,
    stored: Space | None = None,
    objective: Objective = THROUGHPUT,
    baseline: Policy | None = None,
    fits: Callable[[Policy], bool] = lambda _: True,
    sampler: Sampler | None = None,
    left_s: Callable[[], float] = lambda: 0.0,
) -> Study:
    """Opens or resumes a study: `where` is a folder (a journal file in it) or a database URL.

    Policies of the space that do not fit into memory are left out. Every `objective` uses the same study.
    Optuna keeps the points as points of the space `stored`, by default `space`: a space that this run has cut to its
    sound points must not look like another space.
    A database that is away is waited for while the run has time left, which `left_s` returns.
    Raises `StudyError` if the storage cannot be used.
    """
    store = open_store(where, name, stored or space, left_s)
    return Study(store, Catalog(space, to_policy, fits), seed, objective, baseline, sampler)
