"""The storage of studies: a journal file in a folder, or a database. What fails in it becomes a `StudyError`."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.storages import BaseStorage

from amptune.errors import StudyError, first_line
from amptune.search.sampler.journal import journal_storage
from amptune.search.sampler.records import without_password

__all__ = [
    "SQLITE",
    "attributes_of",
    "database_at",
    "experimental",
    "opened",
    "storage_errors",
]

# Making the tables of a database takes less than a second; beside much else, others still made them after ten.
LOCK_S = 60
SQLITE = "sqlite:///"
# So long a server may be away, and so often it is asked.
AWAY_S, ASKED_EVERY_S = 120.0, 0.5

T = TypeVar("T")
LeftS = Callable[[], float]


def opened(where: Path | str, left_s: LeftS = lambda: 0.0) -> BaseStorage:
    """Opens the journal in a folder, which is made if it is missing, or a database, as `database_at` does."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(where, Path):
        where.mkdir(parents=True, exist_ok=True)
        return journal_storage(where)
    return database_at(where, left_s)


def database_at(url: str, left_s: LeftS = lambda: 0.0) -> BaseStorage:
    """Opens a database; raises `StudyError` for one that Optuna cannot open.

    Jobs that start together each make the tables of a new one: those that come second try again. A server that is away
    is waited for as long as a run has time for, which `left_s` returns.
    """
    until_s = time.monotonic() + LOCK_S
    patience = _Patience((lambda: 0.0) if str(url).startswith("sqlite") else left_s)
    while True:
        try:
            storage = patience.with_server(optuna.storages.get_storage)(url)
            for name in BaseStorage.__abstractmethods__:
                setattr(storage, name, patience.with_server(getattr(storage, name)))
            return storage
        except ValueError as error:  # one that Optuna does not know, or a port that is no number
            about = f"{without_password(url)} is no database that Optuna can open"
            why = "its port is no whole number" if "int()" in str(error) else first_line(error)
            raise StudyError(f"{about}: {why}") from error
        except Exception as error:  # sqlalchemy's, which takes a second to import where no database is opened
            is_made_meanwhile = type(error).__name__ == "IntegrityError" or "already exists" in str(error)
            if not is_made_meanwhile or time.monotonic() > until_s:
                raise


def attributes_of(study: optuna.Study) -> dict[str, Any]:
    """Returns a study's attributes without a deep copy, which takes long in a study of many records."""
    return study._storage.get_study_user_attrs(study._study_id)


class _Patience:
    """Patience with a server that restarts. After a wait in vain or an interrupted one it is over until one answers."""

    def __init__(self, left_s: LeftS) -> None:
        self._left_s, self._is_over = left_s, False

    def with_server(self, ask: Callable[..., T]) -> Callable[..., T]:
        """Returns a function that asks again and again until the server is there."""

        def patiently(*args: Any, **kwargs: Any) -> T:
            until_s, pause_s = time.monotonic() + min(AWAY_S, self._left_s()), 0.0
            while True:
                try:
                    time.sleep(pause_s)
                    answer = ask(*args, **kwargs)
                except BaseException as error:
                    self._is_over |= not _is_away(error) or time.monotonic() > until_s
                    if self._is_over:
                        raise
                    pause_s = ASKED_EVERY_S
                else:
                    self._is_over = False
                    return answer

        return patiently


def _is_away(error: BaseException) -> bool:
    """Returns True if a server cannot be reached, or ended the connection; Optuna's error has SQLAlchemy's as cause."""
    return any(type(one).__name__ in ("OperationalError", "InterfaceError") for one in (error, error.__cause__))


@contextmanager
def experimental() -> Iterator[None]:
    """Silences Optuna, which warns of its journal and of some samplers as experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _reason(error: BaseException) -> str:
    """Returns an error's first line, as links to web pages follow; its cause names the missing database driver."""
    missing = error.__cause__ or error.__context__ if isinstance(error, ImportError) else None
    return first_line(error) if missing is None else f"{first_line(error)} ({missing})"


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns the failure of a storage (full disk, broken journal, unreachable database) into `StudyError`."""
    try:
        yield
    except Exception as error:
        is_of_storage = type(error).__module__.startswith(("sqlalchemy", "optuna.exc"))
        if is_of_storage or isinstance(error, OSError | json.JSONDecodeError | ImportError):
            raise StudyError(f"the study cannot be read or written: {_reason(error)}") from error
        raise
