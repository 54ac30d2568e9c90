"""The storage of a study: its trials, and the records beside them."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from amptune.errors import StudyError
from amptune.measure.results.outcome import Failure
from amptune.policy.findings import Finding
from amptune.policy.serialization import in_one_line, policy_to_dict
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.sampler.backend import SQLITE, experimental, opened, storage_errors
from amptune.search.sampler.journal import JOURNAL, NO_RECORD, first_broken
from amptune.search.sampler.leases import Leases
from amptune.search.sampler.records import (
    READERS,
    StudyRecord,
    TuningRecord,
    findings_from,
    without_password,
)
from amptune.search.sampler.stored_trials import distributions_of, running_in, suggest, trials_in
from amptune.search.space.knobs import Point, Space
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["Handle", "Store", "keep_findings", "open_store", "recall"]

# Prefixes of the names of a study's attributes.
TUNING, JUDGED, ROW, TIMELINE, FINDINGS = "tuning", "judged", "row", "timeline", "findings"
# Until a worker that asked has named its policy, its trial is looked at again after so many seconds.
AGAIN_S, NAMED_S = 0.02, 5.0

# A trial that was asked for and has no outcome yet.
Handle = optuna.Trial


class Store:
    """One study in its storage. Every method raises `StudyError` if the storage fails."""

    def __init__(self, study: optuna.Study, space: Space, where: Path | str = "") -> None:
        self._study, self._where = study, where or study.study_name
        self._leases = Leases(study)
        self.distributions = distributions_of(space)
        # Since Optuna 5 a trial stores its own constraint; before, only a sampler can.
        self._teller = None if hasattr(optuna.Trial, "set_constraint") else TPESampler(constraints_func=_violation)

    def _reading(self) -> AbstractContextManager[None]:
        return reading(self._where)

    def trials(self, besides: Collection[int] = ()) -> list[Trial]:
        """Returns the trials that have an outcome, in their order, except those with the numbers `besides`."""
        with self._reading():
            return trials_in(self._study, besides)

    def enqueue(self, point: Point) -> None:
        """Puts a point of the space first, for whichever worker asks next."""
        with self._reading():
            self._study.enqueue_trial(dict(point))

    def join(self) -> None:
        """Says to other workers that this one lives, until `leave`."""
        with self._reading():
            self._leases.begin()

    def leave(self) -> None:
        """Says nothing more of this worker."""
        self._leases.end()

    def give_up_what_nobody_has(self) -> None:
        """Ends the trials of workers that are gone."""
        with self._reading():
            self._leases.give_up_what_nobody_has()

    def ask(self, sampler: BaseSampler) -> Handle:
        """Begins a trial; it has no parameters yet."""
        with self._reading():
            self._study.sampler = sampler
            handle = self._study.ask()
            self._leases.take(handle)
            return handle

    def settle(self, handle: Handle) -> None:
        """Gives a trial its parameters: the enqueued ones if it was enqueued, else the sampler's."""
        with self._reading():
            for name, distribution in self.distributions.items():
                suggest(handle, name, distribution)

    def claim(self, handle: Handle, policy: Policy) -> bool:
        """Names the policy of a trial to all workers; returns False if one that asked before measures it.

        One that asked before and does not say which policy it got, perhaps killed on another host, is not waited for
        longer than `NAMED_S`: both may then measure one policy.
        """
        until_s = time.monotonic() + NAMED_S
        with self._reading():
            handle.set_user_attr("policy", policy_to_dict(policy))
            while True:
                running = {number: one for number, one in running_in(self._study).items() if number < handle.number}
                if policy in running.values():
                    return False
                if None not in running.values() or time.monotonic() > until_s:
                    return True
                self.give_up_what_nobody_has()
                time.sleep(AGAIN_S)

    def running(self) -> set[Policy]:
        """Returns the policies that any worker is measuring."""
        with self._reading():
            return {policy for policy in running_in(self._study).values() if policy is not None}

    def tell(self, handle: Handle, trial: Trial) -> None:
        """Writes the outcome. A failed trial is complete too, with its constraint violated, so samplers see it.

        If others thought that this worker was gone, they have given the trial up: its outcome is left out.
        """
        with self._reading(), suppress(RuntimeError):  # Optuna's, for a trial that has ended
            kept = {**trial.row.as_dict(), "seconds": trial.seconds}
            for name in ("outcome", "seconds", "run", "moment_s"):
                handle.set_user_attr(name, kept[name])
            if self._teller is None:
                handle.set_constraint("feasible", 1.0 if isinstance(trial.outcome, Failure) else 0.0)
            else:
                self._study.sampler = self._teller
            self._study.tell(handle, trial.samples_per_s, skip_if_finished=True)

    def forget(self, handle: Handle) -> None:
        """Ends a trial that was not measured."""
        with self._reading():
            self._study.tell(handle, state=TrialState.FAIL, skip_if_finished=True)

    def rows(self) -> list[Row]:
        """Returns the timings that are no trials, of all runs."""
        with self._reading():
            return _rows_in(self._study.user_attrs)

    def note_tuning(self, tuning: TuningRecord) -> None:
        """Records that a tuning run uses the study."""
        self._note(TUNING, tuning.run, tuning.as_dict())

    def note_row(self, row: Row) -> None:
        """Writes a timing that is no trial."""
        self._note(ROW, uuid.uuid4().hex, row.as_dict())

    def note_timeline(self, run: str, timeline: Sequence[Mapping[str, Any]]) -> None:
        """Records what a tuning run did when."""
        self._note(TIMELINE, run, list(timeline))

    def note_judged(self, judged: Judgement) -> None:
        """Records the numerics gate's judgement of a policy."""
        self._note(JUDGED, hashlib.sha256(str(judged.policy).encode()).hexdigest(), judged.as_dict())

    def _note(self, kind: str, name: str, value: Any) -> None:
        with self._reading():
            self._study.set_user_attr(f"{kind} {name}", value)


def open_store(where: Path | str, name: str, space: Space, left_s: Callable[[], float] = lambda: 0.0) -> Store:
    """Opens or resumes a study: `where` is a folder (a journal file in it) or a database URL.

    A database that is away is waited for while the run has time left, which `left_s` returns. Raises `StudyError` if
    the storage cannot be used.
    """
    with experimental(), reading(where):
        study = optuna.create_study(
            storage=opened(where, left_s), study_name=name, direction="maximize", load_if_exists=True
        )
        return Store(study, space, where)


def keep_findings(where: Path | str, run: str, findings: Iterable[Finding]) -> None:
    """Records what a tuning run noticed, in the study that knows the run. Raises `StudyError` if the storage fails."""
    told = [finding.as_dict() for finding in findings]
    with experimental(), reading(where):
        storage = opened(where)
        for study in storage.get_all_studies():
            if f"{TUNING} {run}" in study.user_attrs:
                storage.set_study_user_attr(study._study_id, f"{FINDINGS} {run}", told)


def _violation(trial: FrozenTrial) -> tuple[float]:
    return (float(trial.user_attrs["outcome"]["failed"]),)


def recall(where: Path | str, name: str | None = None, *, run: str | None = None) -> StudyRecord:
    """Reads a study back: the study `name`, that of a tuning `run`, or the last one in which a policy ran.

    Raises `StudyError` if there is none, or the storage cannot be read.
    """
    if isinstance(where, Path) and not (where / JOURNAL).is_file():
        raise StudyError(f"there is no study in {where}: it has no {JOURNAL}; `amptune tune --study {where}` makes one")
    if isinstance(where, str) and where.startswith(SQLITE) and not Path(where.removeprefix(SQLITE)).is_file():
        raise StudyError(f"there is no study in {where}: to read it would make an empty database")
    shown = without_password(str(where))
    with experimental(), reading(where):
        return _record_of(_chosen(opened(where), shown, name, run), shown)


def _chosen(storage: BaseStorage, where: str, name: str | None, run: str | None) -> optuna.Study:
    names = [study.study_name for study in storage.get_all_studies()]
    if name is not None and name not in names:
        raise StudyError(f"{where} holds no study {name!r}, but {', '.join(sorted(names)) or 'none'}")
    studies = [optuna.load_study(study_name=one, storage=storage) for one in names if name in (None, one)]
    studies = [study for study in studies if run is None or f"{TUNING} {run}" in study.user_attrs]
    tried = [study for study in studies if study.get_trials(deepcopy=False)]
    last = max(list(filter(_ran, tried)) or tried, key=_last_tuned, default=None)
    if last is None:
        raise StudyError(f"there are no trials in {where}: `amptune tune --study {where}` makes some")
    return last


def _ran(study: optuna.Study) -> bool:
    """Returns True if any trial succeeded."""
    return any(value > 0 for trial in study.get_trials(deepcopy=False) for value in trial.values or ())


def _last_tuned(study: optuna.Study) -> tuple[str, str]:
    """Returns when a tuning last began, then when a trial did: a tuning that remembers all its trials makes none."""
    trials = (trial.datetime_start for trial in study.get_trials(deepcopy=False))
    tunings = (value["began"] for key, value in study.user_attrs.items() if key.startswith(f"{TUNING} "))
    return max(tunings, default=""), max((one.isoformat() for one in trials if one is not None), default="")


def _record_of(study: optuna.Study, where: str) -> StudyRecord:
    attributes = study.user_attrs
    kept: dict[str, dict[str, Any]] = {name: {} for name in READERS}
    for key, value in attributes.items():
        kind, _, name = key.partition(" ")
        kept[kind][name] = value
    tunings = sorted(map(TuningRecord.from_dict, kept[TUNING].values()), key=lambda tuning: tuning.began)
    trials = tuple(trials_in(study))
    if not trials:
        raise StudyError(f"no trial of the study {study.study_name} in {where} came to an end: nothing was measured")
    if not tunings:
        raise StudyError(
            f"the study in {where} does not say what its baseline is: `amptune tune` with the same study once more "
            "adds that"
        )
    return StudyRecord(
        name=study.study_name,
        where=where,
        tunings=tuple(tunings),
        trials=trials,
        judged=tuple(map(Judgement.from_dict, kept[JUDGED].values())),
        outside=_outside(study, trials),
        rows=tuple(_rows_in(attributes)),
        timeline=tuple(kept[TIMELINE].get(tunings[-1].run, ())),
        findings=findings_from(kept[FINDINGS].get(tunings[-1].run, ())),
    )


def _rows_in(attributes: Mapping[str, Any]) -> list[Row]:
    """Returns the rows, the oldest first."""
    found, began = [], {}
    for key, value in attributes.items():
        kind, _, name = key.partition(" ")
        if kind == TUNING:
            began[name] = value["began"]
        elif kind == ROW:
            found.append(Row.from_dict(value))
    return sorted(found, key=lambda row: (began.get(row.run, ""), row.run, row.moment_s))


def _outside(study: optuna.Study, trials: Sequence[Trial]) -> frozenset[Policy]:
    """Returns the policies that were asked for without being a point of the space."""
    free = {trial.number for trial in study.get_trials(deepcopy=False) if not trial.params}
    return frozenset(trial.policy for trial in trials if trial.number in free)


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Turns what fails in a storage, and what stands in it and is no study's, into a `StudyError`."""
    try:
        with storage_errors():
            yield
    except NO_RECORD as error:
        if isinstance(where, Path) and (found := first_broken(where)) is not None:
            raise found from error
        raise StudyError(
            f"the study in {without_password(str(where))} cannot be read, it is broken or another version of amptune "
            f"wrote it: {in_one_line(error)}; choose another with --study"
        ) from error
