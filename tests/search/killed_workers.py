"""Workers on one study that are killed at random moments, and what is left of it; and many workers that are not.

`python tests/search/killed_workers.py postgresql --kills 50` prints the outcome; `journal` and `sqlite` need no server.
`… postgresql --workers 16 --trial 4` lets so many work for a minute, whose trials take 4 s each, and then one alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

# A worker measures what the study suggests, and writes down what the study has taken.
WORKER = """
import sys
sys.path[:0] = sys.argv[3:]
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
    time.sleep(2 * float(sys.argv[2]) * random.random())
    outcome = evaluator.measure(suggestion.policy, Effort())
    study.tell(suggestion, Trial(number=len(study.trials), policy=suggestion.policy, outcome=outcome, seconds=1.0))
    print(suggestion.policy, time.time(), sep="\\t", flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What is left: trials that a worker had told and that are lost, policies measured twice, trials still running."""

    kills: int
    told: int
    lost: int
    twice: int
    running: int
    seconds: float


def killed(where: Path | str, kills: int, *, workers: int = 4, seed: int = 0) -> Left:
    """Kills workers at random moments, each in its loop, and starts others; then one that asks once more ends it.

    `where` is a folder or a database URL.
    """
    import optuna
    from optuna.trial import TrialState

    from amptune.search.sampler import backend, leases

    chance, began_s, told = random.Random(seed), time.monotonic(), []
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
            told += output.read_text().splitlines()[1:]
            running[index] = _worker(where, Path(folder) / str(workers + number))
        for process, output in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
            told += output.read_text().splitlines()[1:]
    sys.path[:0] = [str(TESTS), str(TESTS / "search")]
    from test_policy_sampler import opened

    leases.GONE_S = 1.0
    last = opened(where)
    for _ in range(2):  # it sees who stands still, and then gives up what they had
        suggestion = last.suggest()
        if suggestion is not None:
            last.forget(suggestion)
        time.sleep(1.5)
    suggestion = last.suggest()
    if suggestion is not None:
        last.forget(suggestion)
    study = optuna.load_study(study_name="study", storage=backend.opened(where))
    kept = Counter(str(trial.policy) for trial in opened(where).trials)
    return Left(
        kills=kills,
        told=len(told),
        lost=sum(line.split("\t")[0] not in kept for line in told if "\t" in line),
        twice=sum(count > 1 for count in kept.values()),
        running=len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))),
        seconds=round(time.monotonic() - began_s, 1),
    )


@dataclass(frozen=True, kw_only=True)
class AtWork:
    """What so many workers did together: trials a second, policies measured twice, and the way to the best.

    `seconds_to` has the seconds until a policy was known that is no more than that share slower than the best of all.
    """

    workers: int
    trials: int
    a_second: float
    twice: int
    seconds_to: dict[float, float | None]


def at_work(where: Path | str, workers: int, *, trial_s: float, seconds: float) -> AtWork:
    """Lets workers measure what the study suggests; the time counts from when the last of them was ready."""
    with tempfile.TemporaryDirectory() as folder:
        running = [_worker(where, Path(folder) / str(number), trial_s=trial_s) for number in range(workers)]
        while not all(output.read_text() for _, output in running):
            time.sleep(0.05)
        began_s = time.time()
        time.sleep(seconds)
        for process, _ in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
        told = [line.split("\t") for _, output in running for line in output.read_text().splitlines()[1:]]
    sys.path[:0] = [str(TESTS), str(TESTS / "search")]
    from simulated.recorded import recorded_ms
    from test_policy_sampler import candidates, opened

    from amptune.search.space.knobs import points

    known = candidates()
    best_ms = min(recorded_ms("resnet50", known.policy_of(point)) for point in points(known.space))
    trials = opened(where).trials
    over = {str(trial.policy): recorded_ms("resnet50", trial.policy) / best_ms - 1 for trial in trials}
    reached = sorted((float(line[1]) - began_s, over[line[0]]) for line in told if len(line) == 2)
    return AtWork(
        workers=workers,
        trials=len(reached),
        a_second=round(len(reached) / seconds, 2),
        twice=sum(count > 1 for count in Counter(line[0] for line in told).values()),
        seconds_to={
            share: next((round(at_s, 1) for at_s, off in reached if off <= share), None) for share in (0.1, 0.05, 0.01)
        },
    )


def _worker(where: Path | str, output: Path, *, trial_s: float = 0.05) -> tuple[subprocess.Popen[bytes], Path]:
    output.touch()
    command = [sys.executable, "-c", WORKER, str(where), str(trial_s), str(TESTS), str(TESTS / "search"), *sys.path]
    with output.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream), output


POSTGRESQL = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """A server of PostgreSQL on loopback, as Debian's packages bring it; the URL of an empty database."""
    assert POSTGRESQL is not None
    programs, data, port = POSTGRESQL.parent, folder / "data", _free_port()
    data.mkdir()
    as_owner: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        as_owner = ["runuser", "-u", "postgres", "--"]
        for place in (folder, data):
            shutil.chown(place, "postgres")
        for parent in folder.parents:
            if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
                parent.chmod(parent.stat().st_mode | 0o011)

    def run(*command: str) -> None:
        subprocess.run([*as_owner, *command], check=True, capture_output=True, cwd="/")

    run(str(programs / "initdb"), "-D", str(data), "-U", "amptune", "-A", "trust", "--no-sync")
    options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
    run(str(programs / "pg_ctl"), "-D", str(data), "-w", "-l", str(folder / "server.log"), "-o", options, "start")
    try:
        yield f"postgresql+psycopg2://amptune@127.0.0.1:{port}/postgres"
    finally:
        run(str(programs / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("storage", choices=["journal", "postgresql", "sqlite"])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, help="none is killed")
    parser.add_argument("--trial", type=float, default=4.0, metavar="SECONDS")
    arguments = parser.parse_args()
    alone_or_not = [None] if arguments.workers is None else [arguments.workers, 1]
    for workers in alone_or_not:
        with tempfile.TemporaryDirectory() as name, _stored(arguments.storage, Path(name)) as where:
            left = (
                killed(where, arguments.kills)
                if workers is None
                else at_work(where, workers, trial_s=arguments.trial, seconds=60.0)
            )
        print(json.dumps({"storage": arguments.storage, **asdict(left)}))


@contextmanager
def _stored(storage: str, folder: Path) -> Iterator[Path | str]:
    if storage == "postgresql":
        with postgresql(folder) as url:
            yield url
    else:
        yield f"sqlite:///{folder / 'study.db'}" if storage == "sqlite" else folder / "study"


if __name__ == "__main__":
    main()
