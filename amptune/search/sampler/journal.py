"""The journal of a study in a folder: a record a line, checked as it is read; damage is told with its line."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from filelock import FileLock
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from amptune.errors import ObjectiveError, StudyError
from amptune.policy.serialization import finite, in_one_line, text
from amptune.search.sampler.optuna_trials import trial_from
from amptune.search.sampler.records import from_plain, kind_of

__all__ = ["JOURNAL", "NO_RECORD", "first_broken", "journal_storage"]

JOURNAL = "journal.log"
# Errors of reading what is no record: a wrong type, a missing key, a figure that cannot be.
NO_RECORD = (
    ArithmeticError, AssertionError, AttributeError, LookupError, ObjectiveError, RecursionError, TypeError, ValueError,
)  # fmt: skip
_START = b'{"op_code":'
# Optuna's numbers of operations, all of them and some.
_OPERATIONS, _DELETE_STUDY, _SET_STUDY_ATTRIBUTE, _CREATE_TRIAL = range(10), 1, 2, 4


class Journal(JournalFileBackend):
    """The journal in a folder, for any number of writers on this host. Raises `StudyError` with the line of damage.

    The system unlocks it when a writer's process ends; Optuna's own lock is a link that a killed writer leaves behind.
    Nor does a writer wait for the disk, as Optuna's does at each record: a killed one has lost nothing, and
    a machine that loses power only the last lines.
    """

    line = 0
    """The line of the record that was read last."""

    def __init__(self, folder: Path) -> None:
        self._path = (folder / JOURNAL).absolute()
        self._writing = FileLock(self._path.with_name(".lock-journal"))
        # Where each record begins, in bytes and lines, the next one last; and what the records so far have made.
        self._places = [(0, 1)]
        self._studies: set[str] = set()
        self._trials = 0
        super().__init__(str(self._path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._writing:
            _end_the_last_line(self._path)
            with self._path.open("ab") as file:
                file.write(lines.encode())

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yields the records from this number on, without half a line at the end: it is being written, or cut off."""
        begin, line = self._places[log_number_from]
        with self._path.open("rb") as file:
            file.seek(begin)
            for content in file:
                try:
                    record = self._next(content) if content.strip() else None
                except NO_RECORD as error:
                    if _is_cut_off(content):
                        return
                    raise self.damaged(line, error) from error
                self.line, begin, line = line, begin + len(content), line + content.endswith(b"\n")
                if record is not None:
                    self._places.append((begin, line))
                    yield record

    def _next(self, content: bytes) -> dict[str, Any]:
        """Returns the record in a line; one before has made its study and its trial."""
        record = _record_in(content)
        for name, count in (("study_id", len(self._studies)), ("trial_id", self._trials)):
            if name in record and not 0 <= record[name] < count:
                raise ValueError(f"{name}: no record before has made {record[name]}")
        self._trials += record["op_code"] == _CREATE_TRIAL
        self._studies |= {text(record["study_name"])} if "study_name" in record else set()
        return record

    def damaged(self, line: int, error: Exception) -> StudyError:
        """Returns the error that names a line."""
        why = f"{self._path}:{line}: is no record of a study: {in_one_line(error)}"
        advice = "choose another with --study if another version wrote it; else mend or remove the line"
        return StudyError(f"{why}; {advice}")


def journal_storage(folder: Path) -> JournalStorage:
    """Opens the journal of a folder. Raises `StudyError` with the first line that is no record."""
    journal = Journal(folder)
    try:
        return JournalStorage(journal)
    except NO_RECORD as error:
        raise journal.damaged(journal.line, error) from error


def first_broken(folder: Path) -> StudyError | None:
    """Returns the error of the first record with content that this version does not write; None if there is none."""
    journal = Journal(folder)
    try:
        journal_storage(folder)
        for record in journal.read_logs(0):
            for name, value in record["user_attr"].items() if record["op_code"] == _SET_STUDY_ATTRIBUTE else ():
                from_plain(kind_of(name), value)
            if record["op_code"] == _CREATE_TRIAL and record.get("state") == TrialState.COMPLETE:
                trial_from(record["user_attrs"])
                finite(record["value"])
    except StudyError as error:
        return error
    except NO_RECORD as error:
        return journal.damaged(journal.line, error)
    return None


def _record_in(line: bytes) -> dict[str, Any]:
    """Returns the record in a line. Raises `ValueError` with what is wrong, or another error of `NO_RECORD`."""
    record = json.loads(line.decode())
    operation: Any = record.get("op_code") if isinstance(record, dict) else None
    if type(operation) is not int or operation not in _OPERATIONS:
        raise ValueError("it is no object with a known op_code")
    if operation == _DELETE_STUDY and record.keys() != {"op_code", "worker_id", "study_id"}:
        raise ValueError("op_code: this record deletes no study")
    return record  # type: ignore[no-any-return]  # it is an object


def _is_cut_off(line: bytes) -> bool:
    """Returns True for half a record at the end, as a killed writer or a full disk leaves it."""
    return not line.endswith(b"\n") and line.startswith(_START[: len(line)])


def _end_the_last_line(journal: Path) -> None:
    """Ends a record that has lost its line break; drops half a record, which nobody could ever read."""
    with journal.open("rb+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read() in (b"", b"\n"):
            return
        file.seek(0)
        content = file.read()
        last = content.rpartition(b"\n")[2]
        try:
            _record_in(last)
            file.write(b"\n")
        except NO_RECORD:
            file.truncate(len(content) - len(last))
