"""A study on a server of PostgreSQL, at an address as docs/clusters.md has it, that restarts or is not there."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from postgres_server import POSTGRESQL, Server, postgresql
from studies import OOM, TUNING
from test_study import BF16, candidates, trial_of

from amptune.errors import StudyError
from amptune.policy.settings import STOCK, amp_recipe
from amptune.search.request import _require_database
from amptune.search.sampler.study import Study, open_study

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
        opened = open_study(server.url, "study", known.space, known.policy_of, baseline=STOCK, left_s=left_s)
        opened.begin(replace(TUNING, run=str(len(studies))))
        studies.append(opened)
        return opened

    yield study_for
    for study in studies:
        study.end(())
        study._store._study._storage.remove_session()
        study._store._study._storage._backend.engine.dispose()  # type: ignore[attr-defined]  # of what Optuna caches


def test_the_drivers_of_the_documented_address_are_there(server: Server, at_server: At) -> None:
    (scheme,) = set(re.findall(r"--study (\w+://)", (DOCS / "clusters.md").read_text()))
    assert server.url.startswith(scheme)
    _require_database(server.url)
    study = at_server(lambda: 0.0)
    assert study.claim(BF16)
    assert at_server(lambda: 0.0).elsewhere == {BF16}
    study.tell(trial_of(BF16, study))
    assert at_server(lambda: 0.0).history.latest.keys() == {BF16}


def test_a_server_that_restarts_is_waited_for_and_no_trial_is_lost(
    server: Server, at_server: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, pauses = at_server(lambda: math.inf), list[float]()

    def restarted(pause_s: float) -> None:
        if pause_s and not pauses:
            server.start()
            pauses.append(pause_s)

    for policy in (amp_recipe("fp16"), STOCK):
        assert study.claim(policy)
        pauses.clear()
        server.stop()
        monkeypatch.setattr(time, "sleep", restarted)
        study.tell(trial_of(policy, study, OOM))
        assert pauses
        monkeypatch.undo()
    later = at_server(lambda: 0.0)
    assert {trial.policy for trial in later.trials} == {trial.policy for trial in study.trials}
    assert later.elsewhere == frozenset()


def test_a_server_that_does_not_come_back_ends_a_search_that_has_no_time_left(server: Server, at_server: At) -> None:
    study = at_server(lambda: 0.0)
    server.stop()
    try:
        with pytest.raises(StudyError, match="cannot be read or written"):
            study.claim(amp_recipe("fp16", memory_format="channels_last"))
    finally:
        server.start()


def test_a_missing_driver_is_named_with_what_brings_it() -> None:
    with pytest.raises(StudyError, match=r"No module named 'pg8000'; .* pip install '\.\[postgres\]'"):
        _require_database("postgresql+pg8000://me:secret@host/db")
