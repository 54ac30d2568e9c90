"""The study: Optuna says what to try next, its storage remembers what was measured. The only import of Optuna."""

from __future__ import annotations

import json
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, PartialFixedSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from amptune.errors import StudyError
from amptune.measure.outcome import Failure, outcome_from_dict, outcome_to_dict
from amptune.policy.settings import Policy
from amptune.policy.wire import policy_from_dict, policy_to_dict
from amptune.search.space import Point, Space, points
from amptune.search.trial import Trial

__all__ = ["Study", "Suggestion", "open_study"]

REPEATS = 5

ToPolicy = Callable[[Point], Policy]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A policy to measure next; `handle` is Optuna's trial behind it."""

    policy: Policy
    handle: optuna.Trial


class Study:
    """Ask for a policy, tell what became of it. Every outcome is in the storage before the next is asked for."""

    def __init__(self, study: optuna.Study, space: Space, to_policy: ToPolicy, seed: int) -> None:
        self._study = study
        self._sampler = study.sampler
        self._to_policy = to_policy
        self._distributions = _distributions(space)
        self._points = {to_policy(point): point for point in points(space)}
        self._first: deque[Policy] = deque()
        self._random = random.Random(seed)  # noqa: S311  # a choice of what to measure, no secret
        self.trials: list[Trial] = sorted(_remembered(study), key=lambda trial: trial.number)
        self._outcomes = {trial.policy: trial for trial in self.trials}

    def __contains__(self, policy: Policy) -> bool:
        """Whether the space holds a policy, measured or not."""
        return policy in self._points

    def has_knob(self, name: str) -> bool:
        """Whether there is a choice to make there."""
        return len({point[name] for point in self._points.values() if name in point}) > 1

    @property
    def size(self) -> int:
        """How many different policies the space holds."""
        return len(self._points)

    def trial_of(self, policy: Policy) -> Trial | None:
        return self._outcomes.get(policy)

    def measure_first(self, policies: Iterable[Policy]) -> None:
        """Has these suggested before anything the sampler proposes, those outside the space too."""
        self._first.extend(policies)

    def suggest(self, fixed: Mapping[str, Any] | None = None) -> Suggestion | None:
        """The next unmeasured policy, with some knobs fixed; None when every such policy of the space is measured."""
        fixed = fixed or {}
        while self._first:
            if self._first[0] not in self._outcomes:
                return self._ask_for(self._first[0])
            self._first.popleft()
        for attempt in range(2 * REPEATS):
            unmeasured = [policy for policy in self._points if self._is_open(policy, fixed)]
            if not unmeasured:
                return None
            # Optuna proposes what it knows already, by design; after a few of those, draw from what is left.
            tired = attempt >= REPEATS
            suggestion = self._ask_for(self._random.choice(unmeasured)) if tired else self._ask(fixed)
            if suggestion is not None:
                return suggestion
        return None

    def reconsider(self, policy: Policy) -> None:
        """Forgets a failure: what once failed on a busy machine may run now, and without a baseline nothing does."""
        trial = self._outcomes.get(policy)
        if trial is not None and isinstance(trial.outcome, Failure):
            del self._outcomes[policy]
            self.trials.remove(trial)

    def tell(self, suggestion: Suggestion, trial: Trial) -> None:
        """Writes the outcome down. An infeasible trial is told as complete, with its constraint violated.

        Told as FAIL it would be invisible to the sampler, which would keep going back there.
        """
        self.trials.append(trial)  # first of all: a storage that fails now must not lose it
        self._outcomes[trial.policy] = trial
        handle = suggestion.handle
        with _storage_errors():
            handle.set_user_attr("policy", policy_to_dict(trial.policy))
            handle.set_user_attr("outcome", outcome_to_dict(trial.outcome))
            handle.set_user_attr("seconds", trial.seconds)
            self._complete(handle, trial)

    def forget(self, suggestion: Suggestion) -> None:
        """Leaves a suggestion unmeasured, to be asked for again another time."""
        with _storage_errors():
            self._study.tell(suggestion.handle, state=TrialState.FAIL)

    def _is_open(self, policy: Policy, fixed: Mapping[str, Any]) -> bool:
        point = self._points[policy]
        return policy not in self._outcomes and all(point[name] == value for name, value in fixed.items())

    def _ask_for(self, policy: Policy) -> Suggestion | None:
        point = self._points.get(policy)
        with _storage_errors():
            if point is None:  # outside the space: the sampler learns nothing from it, the journal keeps it
                return Suggestion(policy, self._study.ask())
            self._study.enqueue_trial(dict(point))
        return self._ask({})

    def _ask(self, fixed: Mapping[str, Any]) -> Suggestion | None:
        """What Optuna proposes; None, told at once, where that is forbidden or known already."""
        self._study.sampler = _fixing(fixed, self._sampler)
        with _storage_errors():
            handle = self._study.ask(self._distributions)
            policy = self._to_policy(Point(handle.params))
            known = self._outcomes.get(policy)
            if policy in self._points and known is None:
                return Suggestion(policy, handle)
            self._complete(handle, known)
        return None

    def _complete(self, handle: optuna.Trial, trial: Trial | None) -> None:
        feasible = trial is not None and not isinstance(trial.outcome, Failure)
        handle.set_constraint("feasible", 0.0 if feasible else 1.0)
        self._study.tell(handle, trial.samples_per_s if trial else 0.0)


def open_study(where: Path | str, name: str, space: Space, to_policy: ToPolicy, *, seed: int) -> Study:
    """Opens or resumes a study: `where` is a folder (a journal file in it) or a database URL.

    Raises `StudyError` if the storage cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings(), _storage_errors():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Enqueued trials count as start-up trials, so the sampler starts to model only behind them.
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=len(space.try_first) + 8)
        study = optuna.create_study(
            storage=_storage(where), study_name=name, sampler=sampler, direction="maximize", load_if_exists=True
        )
        return Study(study, space, to_policy, seed)


def _fixing(fixed: Mapping[str, Any], sampler: BaseSampler) -> BaseSampler:
    if not fixed:
        return sampler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return PartialFixedSampler(dict(fixed), sampler)


def _storage(where: Path | str) -> BaseStorage:
    if isinstance(where, Path):
        where.mkdir(parents=True, exist_ok=True)
        _drop_half_a_line(where / "journal.log")
        return JournalStorage(JournalFileBackend(str(where / "journal.log")))
    return optuna.storages.get_storage(where)


def _drop_half_a_line(journal: Path) -> None:
    """A full disk or a power cut may leave half a record at the end, which Optuna would stumble over for ever."""
    if not journal.exists():
        return
    content = journal.read_bytes()
    if content and not content.endswith(b"\n"):
        journal.write_bytes(content[: content.rfind(b"\n") + 1])


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    return {knob.name: _distribution(knob.choices) for knob in space.knobs}


def _distribution(choices: tuple[Any, ...]) -> BaseDistribution:
    """An ordered run of integers is one to the sampler too; all else are categories."""
    whole = [choice for choice in choices if isinstance(choice, int) and not isinstance(choice, bool)]
    if len(whole) == len(choices) and whole == list(range(whole[0], whole[-1] + 1)):
        return IntDistribution(whole[0], whole[-1])
    return CategoricalDistribution(choices)


def _remembered(study: optuna.Study) -> Iterator[Trial]:
    for frozen in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        attributes: Mapping[str, Any] = frozen.user_attrs
        if "outcome" in attributes:
            yield Trial(
                number=frozen.number,
                policy=policy_from_dict(attributes["policy"]),
                outcome=outcome_from_dict(attributes["outcome"]),
                seconds=attributes["seconds"],
            )


class _storage_errors:  # noqa: N801  # reads as a function at its uses
    """Turns a storage that fails (a full disk, a broken journal, an unreachable database) into `StudyError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | json.JSONDecodeError) or (
            kind is not None and kind.__module__.startswith(("sqlalchemy", "optuna.exc"))
        ):
            raise StudyError(f"the study cannot be read or written: {error}") from error
