"""The storage of a study: its finished trials, and the records beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
from amptune.search.sampler.backend import SQLITE, attributes_of, experimental, opened, storage_errors
from amptune.search.sampler.claims import Claims
from amptune.search.sampler.journal import JOURNAL, NO_RECORD, first_broken
from amptune.search.sampler.optuna_trials import distributions_of, finished, trial_from
from amptune.search.sampler.records import (
    KINDS,
    StudyRecord,
    TuningRecord,
    from_plain,
    kind_of,
    to_plain,
    without_password,
)
from amptune.search.space.knobs import Point, Space
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["Store", "keep_findings", "open_store", "recall"]


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
            new = _records_in(self._study, "row", self._read)
            self._read |= new.keys()
            return _in_order(new.values(), _records_in(self._study, "tuning")) if new else []

    def sensed(self) -> dict[str, Sensitivity]:
        """Returns the times of modules that the study has, by entry."""
        with self.access():
            return _records_in(self._study, "sensed")

    def keep(self, kind: str, name: str, record: Any) -> None:
        """Writes a record under its kind and a name of its own; it replaces one of the same name."""
        with self.access():
            self._read.add(name)
            self._study.set_user_attr(f"{kind} {name}", to_plain(KINDS[kind], record))


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
    told = to_plain(KINDS["findings"], tuple(findings))
    with experimental(), _reading(where):
        storage = opened(where)
        for study in storage.get_all_studies():
            if f"tuning {run}" in study.user_attrs:
                storage.set_study_user_attr(study._study_id, f"findings {run}", told)


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
    studies = [study for study in studies if run is None or f"tuning {run}" in attributes_of(study)]
    tried = [study for study in studies if _ended_in(study)]
    last = max(list(filter(_ran, tried)) or tried, key=_last_began, default=None)
    if last is None:
        raise StudyError(f"there are no trials in {where}: `amptune tune --study {where}` makes some")
    return last


def _ended_in(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _ran(study: optuna.Study) -> bool:
    """Returns True if any trial succeeded."""
    return any(value > 0 for trial in _ended_in(study) for value in trial.values or ())


def _last_began(study: optuna.Study) -> str:
    """Returns when the last tuning of a study began; "" if it has none."""
    return max((tuning.began for tuning in _records_in(study, "tuning").values()), default="")


def _record_of(study: optuna.Study, where: str) -> StudyRecord:
    tunings = _records_in(study, "tuning")
    if not tunings:
        raise StudyError(
            f"the study in {where} does not say what its baseline is: `amptune tune` with the same study once more "
            "adds that"
        )
    in_order = sorted(tunings.values(), key=lambda tuning: tuning.began)
    trials, outside = _trials_in(study), {one.number for one in _ended_in(study) if not one.params}
    return StudyRecord(
        name=study.study_name,
        where=where,
        tunings=tuple(in_order),
        trials=tuple(trials),
        judged=tuple(_records_in(study, "judged").values()),
        outside=frozenset(trial.policy for trial in trials if trial.number in outside),
        rows=tuple(_in_order(_records_in(study, "row").values(), tunings)),
        timeline=_records_in(study, "timeline").get(in_order[-1].run, ()),
        findings=_records_in(study, "findings").get(in_order[-1].run, ()),
    )


def _trials_in(study: optuna.Study, besides: Collection[int | str] = ()) -> list[Trial]:
    """Returns the finished trials, except those with these numbers, in the order of their ends."""
    in_order = sorted(_ended_in(study), key=lambda one: (one.datetime_complete or datetime.max, one.number))
    return [trial_from(one.user_attrs, one.number) for one in in_order if one.number not in besides]


def _records_in(study: optuna.Study, kind: str, besides: Collection[int | str] = ()) -> dict[str, Any]:
    """Returns the records of a kind by their names. Raises `ValueError` if another version wrote any."""
    found = {}
    for key, value in attributes_of(study).items():
        name = key.partition(" ")[2]
        if kind_of(key) is KINDS[kind] and name not in besides:
            found[name] = from_plain(KINDS[kind], value)
    return found


def _in_order(rows: Iterable[Row], tunings: Mapping[str, TuningRecord]) -> list[Row]:
    """Returns the oldest rows first."""
    return sorted(rows, key=lambda row: (tunings[row.run].began if row.run in tunings else "", row.run, row.moment_s))


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
