"""The study: what was tried and what came of it, in Optuna's storage. The only import of Optuna."""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from amptune.errors import StudyError
from amptune.measure.outcome import Failure, Measurement, outcome_from_dict, outcome_to_dict
from amptune.policy.settings import Policy
from amptune.policy.wire import policy_from_dict, policy_to_dict
from amptune.search.ablation import variants_of
from amptune.search.proposing import Proposer, Seen
from amptune.search.space import Knob, Point, Space, points
from amptune.search.trial import Trial

__all__ = ["Study", "Suggestion", "open_study"]

# A single measurement may show this share of a policy's speed, if something else had the machine meanwhile.
OUTLIER_SHARE = 0.6
# What a policy may reach: so many standard deviations above what is expected of it.
REACH = 3.0

# The FP32 math mode of a policy that computes no product in FP32, to the proposer.
UNUSED = "unused"

ToPolicy = Callable[[Point], Policy]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A policy to measure next; `handle` is Optuna's trial behind it.

    `gain` is the improvement expected of it, on the logarithm of the speed; infinite for one that was asked for.
    Less than `least` samples per second would be a surprise.
    """

    policy: Policy
    handle: optuna.Trial
    gain: float = math.inf
    least: float = 0.0


class Study:
    """Ask for a policy, tell what became of it. Every outcome is in the storage before the next is asked for."""

    def __init__(self, study: optuna.Study, space: Space, to_policy: ToPolicy, seed: int, stored: Space) -> None:
        self._study = study
        self._to_policy = to_policy
        self._distributions = _distributions(stored)
        self._points: dict[Policy, Point] = {}
        for point in points(space):
            self._points.setdefault(to_policy(point), point)  # where a ladder is short, its deeper points are the same
        self._traits = {policy: _traits(policy, point) for policy, point in self._points.items()}
        self._choices = {knob.name: knob.choices for knob in space.knobs}
        self._policies = list(self._points)
        self._index = {policy: index for index, policy in enumerate(self._policies)}
        self._proposer = Proposer(_with_unused(space.knobs), list(self._traits.values()), seed=seed)
        self._first: deque[Policy] = deque()
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
        """Has these suggested before anything else, those outside the space too."""
        self._first.extend(policies)

    def suggest(self, fixed: Mapping[str, Any] | None = None) -> Suggestion | None:
        """The next unmeasured policy, with some knobs fixed; None when every such policy of the space is measured."""
        while self._first:
            if self._first[0] not in self._outcomes:
                return self._ask_for(self._first[0])
            self._first.popleft()
        seen = self._seen()
        proposal = self._proposer.next(seen, fixed or {})
        if proposal is None:
            return None
        return replace(self._ask_for(self._policies[proposal.index]), gain=proposal.gain, least=proposal.least)

    def ranked(self) -> list[Policy]:
        """The policies that were measured, fastest first.

        By what all trials together say of each: a single short measurement may be lucky, or an outlier.
        """
        alive = [trial for trial in self.trials if isinstance(trial.outcome, Measurement)]
        belief = self._proposer.belief(self._seen())

        def speed(trial: Trial) -> float:
            index = self._index.get(trial.policy)
            return math.log(trial.samples_per_s) if belief is None or index is None else float(belief.mean[index])

        return [trial.policy for trial in sorted(alive, key=speed, reverse=True)]

    def neighbours(self, policy: Policy) -> list[Policy]:
        """What is one step from a policy and may be faster: one setting less, or another choice of one knob.

        They are in the order of what they may reach, those outside the space first. But an expectation rules nothing
        out, nor does a measurement that may have been an outlier.
        """
        simpler = [variant.policy for variant in variants_of(policy)]
        own = self._traits.get(policy)
        others = () if own is None else (p for p, its in self._traits.items() if self._steps_between(its, own) == 1)
        near = [other for other in dict.fromkeys([*simpler, *others]) if not self._is_hopeless(other, beside=policy)]
        belief = self._proposer.belief(self._seen())

        def reach(other: Policy) -> float:
            index = self._index.get(other)
            return (
                math.inf
                if belief is None or index is None
                else float(belief.mean[index] + REACH * belief.deviation[index])
            )

        return sorted(near, key=reach, reverse=True)

    def _is_hopeless(self, policy: Policy, *, beside: Policy) -> bool:
        """Whether it failed, or was slower than an outlier explains."""
        trial, other = self._outcomes.get(policy), self._outcomes.get(beside)
        least = OUTLIER_SHARE * other.samples_per_s if other is not None else 0.0
        return trial is not None and (isinstance(trial.outcome, Failure) or trial.samples_per_s < least)

    def _steps_between(self, a: Point, b: Point) -> int:
        """One for another word, and for numbers as many as there are choices from one to the other."""
        return sum(
            1 if isinstance(a[name], str) else abs(choices.index(a[name]) - choices.index(b[name]))
            for name, choices in self._choices.items()
            if a[name] != b[name] and UNUSED not in (a[name], b[name])
        )

    def reconsider(self, policy: Policy) -> None:
        """Forgets a failure: what once failed on a busy machine may run now, and without a baseline nothing does."""
        trial = self._outcomes.get(policy)
        if trial is not None and isinstance(trial.outcome, Failure):
            del self._outcomes[policy]
            self.trials.remove(trial)

    def tell(self, suggestion: Suggestion, trial: Trial) -> None:
        """Writes the outcome down. An infeasible trial is complete too, its constraint violated: it was measured."""
        self.trials.append(trial)  # first of all: a storage that fails now must not lose it
        self._outcomes[trial.policy] = trial
        handle = suggestion.handle
        with _storage_errors():
            handle.set_user_attr("policy", policy_to_dict(trial.policy))
            handle.set_user_attr("outcome", outcome_to_dict(trial.outcome))
            handle.set_user_attr("seconds", trial.seconds)
            handle.set_constraint("feasible", 1.0 if isinstance(trial.outcome, Failure) else 0.0)
            self._study.tell(handle, trial.samples_per_s)

    def forget(self, suggestion: Suggestion) -> None:
        """Leaves a suggestion unmeasured, to be asked for again another time."""
        with _storage_errors():
            self._study.tell(suggestion.handle, state=TrialState.FAIL)

    def _seen(self) -> dict[int, Seen]:
        return {
            self._index[policy]: Seen(speed=trial.samples_per_s or None, seconds=trial.seconds)
            for policy, trial in self._outcomes.items()
            if policy in self._index
        }

    def _ask_for(self, policy: Policy) -> Suggestion:
        point = self._points.get(policy)
        with _storage_errors():
            if point is None:  # outside the space: the journal keeps it all the same
                return Suggestion(policy, self._study.ask())
            self._study.enqueue_trial(dict(point))
            return Suggestion(policy, self._study.ask(self._distributions))


def open_study(
    where: Path | str, name: str, space: Space, to_policy: ToPolicy, *, seed: int, stored: Space | None = None
) -> Study:
    """Opens or resumes a study: `where` is a folder (a journal file in it) or a database URL.

    Optuna keeps the points as of the space `stored`, by default the same: a space that was cut to what is sound this
    time must not be another one to it.
    Raises `StudyError` if the storage cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings(), _storage_errors():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(storage=_storage(where), study_name=name, direction="maximize", load_if_exists=True)
        return Study(study, space, to_policy, seed, stored or space)


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
    """What Optuna calls the choices: an ordered run of integers, or categories."""
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


def _traits(policy: Policy, point: Point) -> Point:
    """What makes a policy fast or slow: the point, but a FP32 math mode that acts on nothing has no part in it."""
    return point if policy.uses_fp32_math or "fp32_math" not in point else Point({**point, "fp32_math": UNUSED})


def _with_unused(knobs: Sequence[Knob]) -> list[Knob]:
    return [replace(knob, choices=(*knob.choices, UNUSED)) if knob.name == "fp32_math" else knob for knob in knobs]


class _storage_errors:  # noqa: N801  # reads as a function at its uses
    """Turns a storage that fails (a full disk, a broken journal, an unreachable database) into `StudyError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | json.JSONDecodeError) or (
            kind is not None and kind.__module__.startswith(("sqlalchemy", "optuna.exc"))
        ):
            raise StudyError(f"the study cannot be read or written: {error}") from error
