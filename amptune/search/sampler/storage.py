"""The storage of a study: its finished trials, and the records beside them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from amptune.errors import StudyError
from amptune.measure.results.half_effects import Sensitivity
from amptune.policy.findings import Finding
from amptune.policy.serialization import in_one_line
from amptune.search.gate.judgement import Judgement
from amptune.search.sampler.backend import SQLITE, attributes_of, experimental, opened, storage_errors
from amptune.search.sampler.claims import Claims
from amptune.search.sampler.journal import JOURNAL, NO_RECORD, first_broken
from amptune.search.sampler.optuna_trials import distributions_of, finished, trial_from
from amptune.search.sampler.records import (
    READERS,
    StudyRecord,
    TuningRecord,
    findings_from,
    sensitivity_from,
    without_password,
)
from amptune.search.space.knobs import Point, Space
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["Store", "keep_findings", "open_store", "recall"]

# Prefixes of the names of a study's attributes.
TUNING, JUDGED, ROW, SENSED, TIMELINE, FINDINGS = "tuning", "judged", "row", "sensed", "timeline", "findings"


class Store:
    """One study in its storage. Whatever reads or writes raises `StudyError` if the storage fails."""

    def __init__(self, study: optuna.Study, space: Space, where: Path | str) -> None:
        self._study, self._where = study, where
        self._distributions = distributions_of(space)
        self._read: set[int | str] = set()
        self.claims = Claims(study)

    def access(self) -> AbstractContextManager[None]:
        """Returns a context in which failures of the storage become a `StudyError`."""
        return _reading(self._where)

    def new_trials(self) -> list[Trial]:
        """Returns the trials that were not returned before, in the order of their ends."""
        with self.access():
            found = _trials_in(self._study, self._read)
            self._read |= {trial.number for trial in found}
            return found

    def add(self, trial: Trial, point: Point | None) -> None:
        """Writes a finished trial, which is one of `point`, None if its policy is outside the space."""
        with self.access():
            self._study.add_trial(finished(trial, point, self._distributions))

    def new_rows(self) -> list[Row]:
        """Returns the timings that are no trials and were not returned before, the oldest first."""
        with self.access():
            kept = _kept(self._study)
            new = {name: row for name, row in kept[ROW].items() if name not in self._read}
            self._read |= new.keys()
            return _in_order(new.values(), kept[TUNING])

    def sensed(self) -> dict[str, Sensitivity]:
        """Returns the times of modules that the study has."""
        with self.access():
            return {name: sensitivity_from(one) for name, one in _kept(self._study)[SENSED].items()}

    def note_sensed(self, entry: str, sensitivity: Sensitivity) -> None:
        """Writes the times of modules."""
        self._note(SENSED, entry, asdict(sensitivity))

    def note_tuning(self, tuning: TuningRecord) -> None:
        """Records that a tuning run uses the study."""
        self._note(TUNING, tuning.run, tuning.as_dict())

    def note_row(self, row: Row) -> None:
        """Writes a timing that is no trial."""
        name = uuid.uuid4().hex
        self._read.add(name)
        self._note(ROW, name, row.as_dict())

    def note_timeline(self, run: str, timeline: Sequence[Mapping[str, Any]]) -> None:
        """Records what a tuning run did when."""
        self._note(TIMELINE, run, list(timeline))

    def note_judged(self, judged: Judgement) -> None:
        """Records the numerics gate's judgement of a policy."""
        self._note(JUDGED, hashlib.sha256(str(judged.policy).encode()).hexdigest(), judged.as_dict())

    def _note(self, kind: str, name: str, value: Any) -> None:
        with self.access():
            self._study.set_user_attr(f"{kind} {name}", value)


def open_store(where: Path | str, name: str, space: Space, left_s: Callable[[], float] = lambda: 0.0) -> Store:
    """Opens or resumes a study: `where` is a folder (a journal file in it) or a database URL.

    A database that is away is waited for while the run has time left, which `left_s` returns. Raises `StudyError` if
    the storage cannot be used.
    """
    with experimental(), _reading(where):
        study = optuna.create_study(
            storage=opened(where, left_s), study_name=name, direction="maximize", load_if_exists=True
        )
        return Store(study, space, where)


def keep_findings(where: Path | str, run: str, findings: Iterable[Finding]) -> None:
    """Records what a tuning run noticed, in the study that knows the run. Raises `StudyError` if the storage fails."""
    told = [finding.as_dict() for finding in findings]
    with experimental(), _reading(where):
        storage = opened(where)
        for study in storage.get_all_studies():
            if f"{TUNING} {run}" in study.user_attrs:
                storage.set_study_user_attr(study._study_id, f"{FINDINGS} {run}", told)


def recall(where: Path | str, name: str | None = None, *, run: str | None = None) -> StudyRecord:
    """Reads a study back: the study `name`, that of a tuning `run`, or the last one in which a policy ran.

    Raises `StudyError` if there is none, or the storage cannot be read.
    """
    if isinstance(where, Path) and not (where / JOURNAL).is_file():
        raise StudyError(f"there is no study in {where}: it has no {JOURNAL}; `amptune tune --study {where}` makes one")
    if isinstance(where, str) and where.startswith(SQLITE) and not Path(where.removeprefix(SQLITE)).is_file():
        raise StudyError(f"there is no study in {where}: to read it would make an empty database")
    shown = without_password(str(where))
    with experimental(), _reading(where):
        return _record_of(_chosen(opened(where), shown, name, run), shown)


def _chosen(storage: BaseStorage, where: str, name: str | None, run: str | None) -> optuna.Study:
    names = [study.study_name for study in storage.get_all_studies()]
    if name is not None and name not in names:
        raise StudyError(f"{where} holds no study {name!r}, but {', '.join(sorted(names)) or 'none'}")
    studies = [optuna.load_study(study_name=one, storage=storage) for one in names if name in (None, one)]
    studies = [study for study in studies if run is None or f"{TUNING} {run}" in study.user_attrs]
    tried = [study for study in studies if _ended_in(study)]
    last = max(list(filter(_ran, tried)) or tried, key=_last_tuned, default=None)
    if last is None:
        raise StudyError(f"there are no trials in {where}: `amptune tune --study {where}` makes some")
    return last


def _ended_in(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _ran(study: optuna.Study) -> bool:
    """Returns True if any trial succeeded."""
    return any(value > 0 for trial in _ended_in(study) for value in trial.values or ())


def _last_tuned(study: optuna.Study) -> tuple[str, str]:
    """Returns when a tuning last began, then when a trial did: a tuning that remembers all its trials makes none."""
    tunings = (value["began"] for value in _kept(study)[TUNING].values())
    trials = (trial.datetime_start.isoformat() for trial in _ended_in(study) if trial.datetime_start is not None)
    return max(tunings, default=""), max(trials, default="")


def _record_of(study: optuna.Study, where: str) -> StudyRecord:
    kept = _kept(study)
    tunings = sorted(map(TuningRecord.from_dict, kept[TUNING].values()), key=lambda tuning: tuning.began)
    if not tunings:
        raise StudyError(
            f"the study in {where} does not say what its baseline is: `amptune tune` with the same study once more "
            "adds that"
        )
    trials = tuple(_trials_in(study))
    outside = {one.number for one in _ended_in(study) if not one.params}
    return StudyRecord(
        name=study.study_name,
        where=where,
        tunings=tuple(tunings),
        trials=trials,
        judged=tuple(map(Judgement.from_dict, kept[JUDGED].values())),
        outside=frozenset(trial.policy for trial in trials if trial.number in outside),
        rows=tuple(_in_order(kept[ROW].values(), kept[TUNING])),
        timeline=tuple(kept[TIMELINE].get(tunings[-1].run, ())),
        findings=findings_from(kept[FINDINGS].get(tunings[-1].run, ())),
    )


def _trials_in(study: optuna.Study, besides: Collection[int | str] = ()) -> list[Trial]:
    """Returns the finished trials, except those with these numbers, in the order of their ends."""
    in_order = sorted(_ended_in(study), key=lambda one: (one.datetime_complete or datetime.max, one.number))
    return [trial_from(one.user_attrs, one.number) for one in in_order if one.number not in besides]


def _kept(study: optuna.Study) -> Mapping[str, Mapping[str, Any]]:
    """Returns a study's attributes by their kinds, then their names; raises `KeyError` for a kind not known here."""
    kept: dict[str, dict[str, Any]] = {kind: {} for kind in READERS}
    for key, value in attributes_of(study).items():
        kind, _, name = key.partition(" ")
        kept[kind][name] = value
    return kept


def _in_order(rows: Iterable[Any], tunings: Mapping[str, Any]) -> list[Row]:
    """Reads rows; the oldest come first."""
    return sorted(
        map(Row.from_dict, rows),
        key=lambda row: (tunings[row.run]["began"] if row.run in tunings else "", row.run, row.moment_s),
    )


@contextmanager
def _reading(where: Path | str) -> Iterator[None]:
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
