"""The study: what was tried and what came of it, in Optuna's storage. The only import of Optuna."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from amptune.errors import StudyError
from amptune.measure.outcome import Failure, Measurement, Outcome, outcome_from_dict, outcome_to_dict
from amptune.policy.settings import Policy
from amptune.policy.wire import in_one_line, policy_from_dict, policy_to_dict
from amptune.search.ablation import variants_of
from amptune.search.events import Event, Observer, PolicyJudged
from amptune.search.gate import Judgement
from amptune.search.memory_model import arm_of
from amptune.search.objective import THROUGHPUT, Objective, Yardstick
from amptune.search.proposing import Proposer, Seen, features_of, with_features
from amptune.search.remembered import Judged, StudyRecord, TuningRecord, without_password
from amptune.search.space import BATCH_SIZE, Knob, Point, Space, points
from amptune.search.trial import Trial

__all__ = ["JOURNAL", "Study", "Suggestion", "open_study", "recall"]

JOURNAL = "journal.log"
# What the study's own attributes begin with.
TUNING, JUDGED = "tuning", "judged"

# A single measurement may show this share of what a policy can do, if something else had the machine meanwhile.
OUTLIER_SHARE = 0.6
# What a policy may reach: so many standard deviations above what is expected of it.
REACH = 3.0

SQLITE = "sqlite:///"
# Larger than any batch.
LARGEST_BATCH = 2**31

# The FP32 math mode of a policy that computes no product in FP32, to the proposer.
UNUSED = "unused"

ToPolicy = Callable[[Point], Policy]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A policy to measure next; `handle` is Optuna's trial behind it.

    `gain` is the improvement expected of it, on the logarithm of the score; infinite for one that was asked for.
    A score of less than `least` would be a surprise. `cost` is what the trial takes, in times of a plain one.
    """

    policy: Policy
    handle: optuna.Trial
    gain: float = math.inf
    least: float = 0.0
    cost: float = 1.0


class Study:
    """Ask for a policy, tell what became of it. Every outcome is in the storage before the next is asked for.

    The trials are those of any objective. One is remembered where it has the figure that this `objective` goes by, or
    failed; speed that is needed is held against the `baseline`.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        to_policy: ToPolicy,
        seed: int,
        stored: Space,
        objective: Objective = THROUGHPUT,
        baseline: Policy | None = None,
        fits: Callable[[Policy], bool] = lambda _: True,
    ) -> None:
        self._study = study
        self._objective = objective
        self._baseline = baseline
        self._to_policy = to_policy
        self._distributions = _distributions(stored)
        self._points: dict[Policy, Point] = {}
        for point in points(space):
            policy = to_policy(point)
            if fits(policy):
                self._points.setdefault(policy, point)  # where a ladder is short, its deeper points are the same
        self._traits = {policy: _traits(policy, point) for policy, point in self._points.items()}
        self._choices = {knob.name: knob.choices for knob in space.knobs}
        self._policies = list(self._points)
        self._index = {policy: index for index, policy in enumerate(self._policies)}
        self._proposer = Proposer(
            with_features(_with_unused(space.knobs)), list(map(features_of, self._traits.values())), seed=seed
        )
        self._first: deque[Policy] = deque()
        self._left_out: set[int] = set()
        self.trials: list[Trial] = sorted(filter(self._tells, _remembered(study)), key=lambda trial: trial.number)
        self._outcomes = {trial.policy: trial for trial in self.trials}
        self._sizes = sorted({policy.batch_size for policy in self._policies if policy.batch_size is not None})
        for trial in self.trials:
            self._note_size(trial)

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

    @property
    def yardstick(self) -> Yardstick:
        """What trials are compared by, as far as it is known."""
        trial = self._outcomes.get(self._baseline) if self._baseline is not None else None
        outcome = trial.outcome if trial is not None else None
        return Yardstick(self._objective, outcome if isinstance(outcome, Measurement) else None)

    def _tells(self, trial: Trial) -> bool:
        """Whether a trial says something for the objective."""
        return isinstance(trial.outcome, Failure) or self._objective.score(trial.outcome) is not None

    def leave_out(self, which: Callable[[Policy], bool]) -> None:
        """Has none of these suggested any more."""
        self._left_out |= {index for index, policy in enumerate(self._policies) if which(policy)}
        self._first = deque(policy for policy in self._first if not which(policy))

    def next_smaller(self, policy: Policy) -> Policy | None:
        """The same with the next smaller batch size of the space, if there is one."""
        point, smaller = self._points.get(policy), [size for size in self._sizes if size < (policy.batch_size or 0)]
        return self._to_policy(Point({**point, BATCH_SIZE: smaller[-1]})) if point is not None and smaller else None

    def _note_size(self, trial: Trial) -> None:
        """Where a batch is too large, larger ones of its kind are too."""
        if self._is_too_large(trial):
            kind, size = arm_of(trial.policy), trial.policy.batch_size or 0
            self.leave_out(lambda policy: (policy.batch_size or 0) >= size and arm_of(policy) == kind)

    def _is_too_large(self, trial: Trial) -> bool:
        """Whether it ran out of memory, and a smaller batch might not: that says nothing of its other settings."""
        return len(self._sizes) > 1 and isinstance(trial.outcome, Failure) and trial.outcome.kind == "oom"

    @property
    def has_left_out(self) -> bool:
        """Whether that kept any policy from being measured."""
        return any(self._policies[index] not in self._outcomes for index in self._left_out)

    def begin(self, tuning: TuningRecord) -> None:
        """Writes down that a tuning run uses the study from now on."""
        with _storage_errors():
            self._study.set_user_attr(f"{TUNING} {tuning.run}", tuning.as_dict())

    def keeping_judgements(self, observer: Observer) -> Observer:
        """The observer, and what the numerics gate says written down; a storage that fails loses that alone."""

        def observe(event: Event) -> None:
            if isinstance(event, PolicyJudged):
                with suppress(StudyError):
                    self.keep(event.judgement)
            observer(event)

        return observe

    def keep(self, judgement: Judgement) -> None:
        """Writes down what the numerics gate says of a policy."""
        judged = Judged.of(judgement)
        digest = hashlib.sha256(str(judged.policy).encode()).hexdigest()[:12]
        with _storage_errors():
            self._study.set_user_attr(f"{JUDGED} {digest}", judged.as_dict())

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
        proposal = self._proposer.next(seen, fixed or {}, self._left_out)
        if proposal is None:
            return None
        suggestion = self._ask_for(self._policies[proposal.index])
        return replace(suggestion, gain=proposal.gain, least=proposal.least, cost=proposal.cost)

    def ranked(self) -> list[Policy]:
        """The policies that were measured, the best first, those that are too slow for the objective last.

        By what all trials together say of each: a single short measurement may be lucky, or an outlier.
        """
        belief, yardstick = self._proposer.belief(self._seen()), self.yardstick

        def place(trial: Trial, outcome: Measurement, score: float) -> tuple[bool, float]:
            index = self._index.get(trial.policy)
            expected = math.log(score) if belief is None or index is None else float(belief.mean[index])
            return yardstick.allows(outcome), expected

        places = {
            trial.policy: place(trial, trial.outcome, score)
            for trial in self.trials
            if isinstance(trial.outcome, Measurement) and (score := yardstick.score(trial.outcome)) is not None
        }
        return sorted(places, key=places.__getitem__, reverse=True)

    def neighbours(self, policy: Policy) -> list[Policy]:
        """What is one step from a policy and may be better: one setting less, or another choice of one knob.

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
        """Whether it failed, or was worse than an outlier explains."""
        trial, other = self._outcomes.get(policy), self._outcomes.get(beside)
        if trial is None or isinstance(trial.outcome, Failure):
            return trial is not None
        if self.yardstick.share_of_needed_speed(trial.outcome) < OUTLIER_SHARE:
            return True
        best = self._plain_score(other.outcome) if other is not None else 0.0
        return self._plain_score(trial.outcome) < OUTLIER_SHARE * best

    def _plain_score(self, outcome: Outcome) -> float:
        """Whatever its speed: that is one measurement, and may be an outlier."""
        return (self._objective.score(outcome) or 0.0) if isinstance(outcome, Measurement) else 0.0

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
        self._note_size(trial)

    def forget(self, suggestion: Suggestion) -> None:
        """Leaves a suggestion unmeasured, to be asked for again another time."""
        with _storage_errors():
            self._study.tell(suggestion.handle, state=TrialState.FAIL)

    def _seen(self) -> dict[int, Seen]:
        yardstick = self.yardstick
        return {
            self._index[policy]: Seen(score=yardstick.score(trial.outcome), seconds=trial.seconds)
            for policy, trial in self._outcomes.items()
            if policy in self._index and not self._is_too_large(trial)
        }

    def _ask_for(self, policy: Policy) -> Suggestion:
        point = self._points.get(policy)
        with _storage_errors():
            if point is None:  # outside the space: the journal keeps it all the same
                return Suggestion(policy, self._study.ask())
            self._study.enqueue_trial(dict(point))
            return Suggestion(policy, self._study.ask(self._distributions))


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
) -> Study:
    """Opens or resumes a study: `where` is a folder (a journal file in it) or a database URL.

    Policies of the space that do not fit into memory are left out. Whatever the `objective`, it is the same study.
    Optuna keeps the points as of the space `stored`, by default the same: a space that was cut to what is sound this
    time must not be another one to it.
    Raises `StudyError` if the storage cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings(), _storage_errors():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(storage=_storage(where), study_name=name, direction="maximize", load_if_exists=True)
        return Study(study, space, to_policy, seed, stored or space, objective, baseline, fits)


def recall(where: Path | str, name: str | None = None, *, run: str | None = None) -> StudyRecord:
    """Reads back what was tuned there: the study `name`, that of a tuning `run`, or the one that was last tuned.

    Raises `StudyError` if there is none, or the storage cannot be read.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(where, Path) and not (where / JOURNAL).is_file():
        raise StudyError(f"there is no study in {where}: it has no {JOURNAL}; `amptune tune --study {where}` makes one")
    if isinstance(where, str) and where.startswith(SQLITE) and not Path(where.removeprefix(SQLITE)).is_file():
        raise StudyError(f"there is no study in {where}: to read it would make an empty database")
    with warnings.catch_warnings(), _storage_errors(), _broken_records(where):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = JournalStorage(_backend(where)) if isinstance(where, Path) else optuna.storages.get_storage(where)
        return _record_of(_chosen(storage, where, name, run), where)


def _chosen(storage: BaseStorage, where: Path | str, name: str | None, run: str | None) -> optuna.Study:
    names = [study.study_name for study in storage.get_all_studies()]
    if name is not None and name not in names:
        raise StudyError(f"{where} holds no study {name!r}, but {', '.join(sorted(names)) or 'none'}")
    studies = [optuna.load_study(study_name=one, storage=storage) for one in names if name in (None, one)]
    studies = [study for study in studies if run is None or f"{TUNING} {run}" in study.user_attrs]
    tried = [study for study in studies if study.get_trials(deepcopy=False)]
    last = max(tried, key=_last_tuned, default=None)
    if last is None:
        raise StudyError(f"there are no trials in {where}: `amptune tune --study {where}` makes some")
    return last


def _last_tuned(study: optuna.Study) -> tuple[str, str]:
    """When a tuning last began, or else a trial: one that remembers all its trials makes none."""
    trials = (trial.datetime_start for trial in study.get_trials(deepcopy=False))
    tunings = (value["began"] for key, value in study.user_attrs.items() if key.startswith(f"{TUNING} "))
    return max(tunings, default=""), max((one.isoformat() for one in trials if one is not None), default="")


def _record_of(study: optuna.Study, where: Path | str) -> StudyRecord:
    attributes = study.user_attrs
    kept: dict[str, list[Any]] = {TUNING: [], JUDGED: []}
    for key, value in attributes.items():
        kept.get(key.partition(" ")[0], []).append(value)
    tunings = sorted(map(TuningRecord.from_dict, kept[TUNING]), key=lambda tuning: tuning.began)
    trials = tuple(sorted(_remembered(study), key=lambda trial: trial.number))
    if not trials:
        raise StudyError(f"no trial of the study {study.study_name} in {where} came to an end: nothing was measured")
    if not tunings:
        raise StudyError(
            f"the study in {where} does not say what its baseline is, being of an earlier amptune; "
            "`amptune tune` with the same study once more adds that"
        )
    return StudyRecord(
        name=study.study_name,
        where=without_password(str(where)),
        tunings=tuple(tunings),
        trials=trials,
        judged=tuple(map(Judged.from_dict, kept[JUDGED])),
        outside=_outside(study, trials),
    )


def _outside(study: optuna.Study, trials: Sequence[Trial]) -> frozenset[Policy]:
    """The policies that were asked for without being a point of the space."""
    free = {trial.number for trial in study.get_trials(deepcopy=False) if not trial.params}
    return frozenset(trial.policy for trial in trials if trial.number in free)


@contextmanager
def _broken_records(where: Path | str) -> Iterator[None]:
    """Records that are no study's, a half-written file or another program's, are a `StudyError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise StudyError(f"the study in {where} is broken and cannot be read: {in_one_line(error)}") from error


def _backend(folder: Path) -> JournalFileBackend:
    return JournalFileBackend(str(folder / JOURNAL))


def _storage(where: Path | str) -> BaseStorage:
    if isinstance(where, Path):
        where.mkdir(parents=True, exist_ok=True)
        _drop_half_a_line(where / JOURNAL)
        return JournalStorage(_backend(where))
    return optuna.storages.get_storage(where)


def _drop_half_a_line(journal: Path) -> None:
    """A full disk or a power cut may leave half a record at the end, which Optuna would stumble over for ever."""
    if not journal.exists():
        return
    content = journal.read_bytes()
    if content and not content.endswith(b"\n"):
        journal.write_bytes(content[: content.rfind(b"\n") + 1])


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    return {knob.name: _distribution(knob) for knob in space.knobs}


def _distribution(knob: Knob) -> BaseDistribution:
    """What Optuna calls the choices: an ordered run of integers, or categories; of batch sizes any at all."""
    choices: tuple[Any, ...] = knob.choices
    if knob.name == BATCH_SIZE:
        return IntDistribution(1, LARGEST_BATCH, log=True)
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


def _first_line(error: BaseException | None) -> str:
    """What follows it are links to a library's pages; the driver that a database needs is named by the cause."""
    words = str(error).partition("\n")[0]
    missing = error.__cause__ or error.__context__ if isinstance(error, ImportError) else None
    return words if missing is None else f"{words} ({missing})"


class _storage_errors:  # noqa: N801  # reads as a function at its uses
    """Turns a storage that fails (a full disk, a broken journal, an unreachable database) into `StudyError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | json.JSONDecodeError | ImportError) or (
            kind is not None and kind.__module__.startswith(("sqlalchemy", "optuna.exc"))
        ):
            raise StudyError(f"the study cannot be read or written: {_first_line(error)}") from error
