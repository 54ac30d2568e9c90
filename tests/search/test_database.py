"""A study on a server of PostgreSQL, at an address as docs/clusters.md has it, that restarts or is not there."""

from __future__ import annotations

import re
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


At = Callable[[], Study]


@pytest.fixture
def at_server(server: Server) -> Iterator[At]:
    """Opens the study for another run; psycopg wants its connections closed."""
    known, studies = candidates(), list[Study]()

    def study_for() -> Study:
        opened = open_study(server.url, "study", known.space, known.policy_of, baseline=STOCK)
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
    study = at_server()
    assert study.claim(BF16)
    assert at_server().elsewhere == {BF16}
    study.tell(trial_of(BF16, study))
    assert at_server().history.latest.keys() == {BF16}


def test_a_server_that_has_restarted_is_reached_again_and_one_that_is_away_is_an_error(
    server: Server, at_server: At
) -> None:
    study = at_server()
    for policy in (amp_recipe("fp16"), STOCK):
        assert study.claim(policy)
        server.stop()
        try:
            with pytest.raises(StudyError, match="cannot be read or written"):
                study.claim(amp_recipe("fp16", memory_format="channels_last"))
        finally:
            server.start()
        study.tell(trial_of(policy, study, OOM))
    later = at_server()
    assert {trial.policy for trial in later.trials} == {trial.policy for trial in study.trials}
    assert later.elsewhere == frozenset()


def test_a_missing_driver_is_named_with_what_brings_it() -> None:
    with pytest.raises(StudyError, match=r"No module named 'pg8000'; .* pip install '\.\[postgres\]'"):
        _require_database("postgresql+pg8000://me:secret@host/db")
