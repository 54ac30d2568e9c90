"""The journal of a study in a folder: a record a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from amptune.errors import ObjectiveError
from amptune.policy.serialization import in_one_line

__all__ = ["JOURNAL", "NO_RECORD", "broken_line", "journal_storage"]

JOURNAL = "journal.log"
# Errors of reading what is no record: a wrong type, a missing key, a figure that cannot be.
NO_RECORD = (
    ArithmeticError, AssertionError, AttributeError, LookupError, ObjectiveError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class Journal(JournalFileBackend):
    """The journal in a folder, for any number of writers on this host.

    The system unlocks it when a writer's process ends; Optuna's own lock is a link that a killed writer leaves behind.
    Nor does a writer wait for the disk, as Optuna's does at each record: a killed one has lost nothing, and
    a machine that loses power only the last lines.
    """

    def __init__(self, folder: Path) -> None:
        self._path = (folder / JOURNAL).absolute()
        self._writing = FileLock(self._path.with_name(".lock-journal"))
        super().__init__(str(self._path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Writes records, in place of half a record at the end, which a killed writer or a full disk leaves."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._writing, self._path.open("rb+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.seek(file.read().rfind(b"\n") + 1)
                    file.truncate()
            file.write(lines.encode())


def journal_storage(folder: Path) -> JournalStorage:
    """Opens the journal of a folder. Raises one of `NO_RECORD` for a line that is no record."""
    return JournalStorage(Journal(folder))


def broken_line(folder: Path) -> str | None:
    """Returns the place of the first line that is no record, and what is wrong with it; None if there is none."""
    path = (folder / JOURNAL).absolute()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            json.loads(line)["op_code"]
        except NO_RECORD as error:
            return f"{path}:{number}: is no record of a study: {in_one_line(error)}"
    return None
