"""A study on a server of PostgreSQL, at an address as docs/clusters.md has it, that restarts or is not there."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from postgres_server import POSTGRESQL, Server, postgresql
from test_policy_sampler import candidates, searched

from amptune.errors import StudyError
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK
from amptune.search.request import _require_database
from amptune.search.sampler.study import Study, open_study
from amptune.search.table.trial import Trial

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if POSTGRESQL is None:
        pytest.skip("needs PostgreSQL")
    with postgresql() as server:
        yield server


At = Callable[[Callable[[], float]], Study]


@pytest.fixture
def at_server(server: Server) -> Iterator[At]:
    """Opens the study for a run that has so much time left; psycopg wants its connections closed."""
    known, studies = candidates(), list[Study]()

    def study_for(left_s: Callable[[], float]) -> Study:
        opened = open_study(server.url, "study", known.space, known.policy_of, seed=0, baseline=STOCK, left_s=left_s)
        studies.append(opened)
        return opened

    yield study_for
    for study in studies:
        study._store._study._storage.remove_session()
        study._store._study._storage._backend.engine.dispose()  # type: ignore[attr-defined]  # of what Optuna caches


def test_the_drivers_of_the_documented_address_are_there(server: Server, at_server: At) -> None:
    (scheme,) = set(re.findall(r"--study (\w+://)", (DOCS / "clusters.md").read_text()))
    assert server.url.startswith(scheme)
    _require_database(server.url)
    assert len(searched(at_server(lambda: 0.0), 2)) == 2


def test_a_server_that_restarts_is_waited_for_and_no_trial_is_lost(
    server: Server, at_server: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, pauses = at_server(lambda: math.inf), list[float]()

    def restarted(pause_s: float) -> None:
        if pause_s and not pauses:
            server.start()
            pauses.append(pause_s)

    for _ in range(2):
        suggestion = study.suggest()
        assert suggestion is not None
        pauses.clear()
        server.stop()
        monkeypatch.setattr(time, "sleep", restarted)
        trial = Trial(number=0, policy=suggestion.policy, outcome=Failure(kind="oom", message=""), seconds=1.0)
        study.tell(suggestion, trial)
        assert pauses
        monkeypatch.undo()
    assert {trial.policy for trial in at_server(lambda: 0.0).trials} == {trial.policy for trial in study.trials}
    assert study._store.running() == set()


def test_a_server_that_does_not_come_back_ends_a_search_that_has_no_time_left(server: Server, at_server: At) -> None:
    study = at_server(lambda: 0.0)
    server.stop()
    try:
        with pytest.raises(StudyError, match="cannot be read or written"):
            study.suggest()
    finally:
        server.start()


def test_a_missing_driver_is_named_with_what_brings_it() -> None:
    with pytest.raises(StudyError, match=r"No module named 'pg8000'; .* pip install '\.\[postgres\]'"):
        _require_database("postgresql+pg8000://me:secret@host/db")
