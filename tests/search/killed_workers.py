"""Workers on one study that are killed at random moments, and what is left of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]

# A worker measures what the study suggests, and writes down what the study has taken.
WORKER = """
import sys
sys.path[:0] = sys.argv[2:]
import random, time
from pathlib import Path
from amptune.search.sampler import leases
leases.BEAT_S, leases.GONE_S = 0.2, 4.0
from simulated.recorded import RecordedEvaluator
from test_policy_sampler import opened
from amptune.measure.results.outcome import Effort
from amptune.search.table.trial import Trial
study = opened(sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1]))
study._store.join()
evaluator = RecordedEvaluator("resnet50")
print("ready", flush=True)
while (suggestion := study.suggest()) is not None:
    time.sleep(0.1 * random.random())
    outcome = evaluator.measure(suggestion.policy, Effort())
    study.tell(suggestion, Trial(number=len(study.trials), policy=suggestion.policy, outcome=outcome, seconds=1.0))
    print(suggestion.policy, flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What is left: trials that a worker had told and that are lost, policies measured twice, trials still running."""

    told: int
    lost: int
    twice: int
    running: int


def killed(where: Path | str, kills: int, *, workers: int = 4, seed: int = 0) -> Left:
    """Kills workers at random moments, each in its loop, and starts others; then one that asks once more ends it.

    `where` is a folder or a database URL.
    """
    import optuna
    from optuna.trial import TrialState

    from amptune.search.sampler import backend, leases

    chance, told = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        running = [_worker(where, Path(folder) / str(number)) for number in range(workers)]
        for number in range(kills):
            index = chance.randrange(workers)
            process, output = running[index]
            # every other worker has told a trial, the rest have just begun
            while output.read_text().count("\n") < 1 + number % 2 and process.poll() is None:
                time.sleep(0.05)
            time.sleep(0.5 * chance.random())
            process.send_signal(signal.SIGKILL)
            process.wait()
            told += _told_in(output)
            running[index] = _worker(where, Path(folder) / str(workers + number))
        for process, output in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
            told += _told_in(output)
    sys.path[:0] = [str(TESTS), str(TESTS / "search")]
    from test_policy_sampler import opened

    last = opened(where)
    with mock.patch.object(leases, "GONE_S", 1.0):
        for _ in range(3):  # it sees who stands still, and then gives up what they had
            if (suggestion := last.suggest()) is not None:
                last.forget(suggestion)
            time.sleep(1.5)
    study = optuna.load_study(study_name="study", storage=backend.opened(where))
    reader = opened(where)
    kept = Counter(str(trial.policy) for trial in reader.trials)
    left = Left(
        told=len(told),
        lost=sum(line not in kept for line in told),
        twice=sum(count > 1 for count in kept.values()),
        running=len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))),
    )
    for storage in (last._store._study._storage, reader._store._study._storage, study._storage):
        storage.remove_session()
        if (engine := getattr(getattr(storage, "_backend", None), "engine", None)) is not None:
            engine.dispose()  # psycopg wants its connections closed
    return left


def _told_in(output: Path) -> list[str]:
    """The whole lines of a worker, but for the first, which says that it is ready."""
    return output.read_text().rpartition("\n")[0].splitlines()[1:]


def _worker(where: Path | str, output: Path) -> tuple[subprocess.Popen[bytes], Path]:
    output.touch()
    command = [sys.executable, "-c", WORKER, str(where), str(TESTS), str(TESTS / "search"), *sys.path]
    with output.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream), output


POSTGRESQL = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server with an empty database: its URL as docs/clusters.md has it, and how it is stopped and started."""

    url: str
    stop: Callable[[], None]
    start: Callable[[], None]


@contextmanager
def postgresql() -> Iterator[Server]:
    """A server of PostgreSQL on loopback, as Debian's packages bring it.

    Its folder is not in pytest's, which the next session of pytest closes to the server's user.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield from _served(Path(folder))


def _served(folder: Path) -> Iterator[Server]:
    assert POSTGRESQL is not None
    programs, data, port = POSTGRESQL.parent, folder / "data", _free_port()
    data.mkdir()
    as_owner: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        as_owner = ["runuser", "-u", "postgres", "--"]
        for place in (folder, data):
            shutil.chown(place, "postgres")

    def run(*command: str) -> None:
        subprocess.run([*as_owner, *command], check=True, capture_output=True, cwd="/")

    run(str(programs / "initdb"), "-D", str(data), "-U", "amptune", "-A", "trust", "--no-sync")
    control = str(programs / "pg_ctl"), "-D", str(data)
    options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
    server = Server(
        url=f"postgresql://amptune@127.0.0.1:{port}/postgres",
        stop=lambda: run(*control, "-m", "immediate", "stop"),
        start=lambda: run(*control, "-w", "-l", str(folder / "server.log"), "-o", options, "start"),
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
