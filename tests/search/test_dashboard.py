"""What `optuna-dashboard` shows of a study that amptune wrote."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from simulated.recorded import RecordedEvaluator
from test_pipeline import tuned_on

from amptune.search.sampler.backend import JOURNAL

STARTS_WITHIN_S = 60


@contextmanager
def dashboard(storage: Path) -> Iterator[int]:
    """The port on which the program answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    program = "import sys; from optuna_dashboard._cli import main; sys.exit(main())"
    command = [sys.executable, "-W", "ignore", "-c", program, str(storage), "--port", str(port), "--server", "wsgiref"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.kill()


def asked(port: int, path: str) -> Any:
    until = time.monotonic() + STARTS_WITHIN_S
    while True:
        connection = HTTPConnection("127.0.0.1", port, timeout=STARTS_WITHIN_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return json.loads(answer.read())
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.1)
        finally:
            connection.close()


@pytest.mark.slow
def test_optunas_dashboard_shows_a_study(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=6)
    with dashboard(tmp_path / JOURNAL) as port:
        (study,) = asked(port, "/api/studies")["study_summaries"]
        shown = asked(port, f"/api/studies/{study['study_id']}")
    done = [trial for trial in shown["trials"] if trial["state"] == "Complete"]
    assert study["directions"] == ["maximize"]
    assert len(done) >= 6
    assert all(trial["values"][0] > 0 for trial in done)
    assert {"autocast", "memory_format"} <= {param["name"] for trial in done for param in trial["params"]}
    assert decision.policy.autocast in {p["param_external_value"] for trial in done for p in trial["params"]}
