"""The storage of studies: a journal file in a folder, or a database. What fails in it becomes a `StudyError`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage

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


def opened(where: Path | str) -> BaseStorage:
    """Opens the journal in a folder, which is made if it is missing, or a database, as `database_at` does."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(where, Path):
        where.mkdir(parents=True, exist_ok=True)
        return journal_storage(where)
    return database_at(where)


def database_at(url: str) -> BaseStorage:
    """Opens a database; raises `StudyError` for one that Optuna cannot open.

    Jobs that start together each make the tables of a new one: those that come second try again. A connection that the
    server ended meanwhile, to restart for example, is made anew.
    """
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            return optuna.storages.get_storage(RDBStorage(url, engine_kwargs={"pool_pre_ping": True}))
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
    """Turns the failure of a storage (full disk, unreachable database) into `StudyError`."""
    try:
        yield
    except Exception as error:
        is_of_storage = type(error).__module__.startswith(("sqlalchemy", "optuna.exc"))
        if is_of_storage or isinstance(error, OSError | ImportError):
            raise StudyError(f"the study cannot be read or written: {_reason(error)}") from error
        raise
