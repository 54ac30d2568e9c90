"""Steps over two real processes on the CPU, which exchange gradients by gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import in_ranks as how
import psutil
import pytest

from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Measurement
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Of all that must succeed, on a slow and busy machine too.
LIMIT_S = 240.0
QUICK = Effort(warmup_s=0.1, measure_s=0.02, min_steps=3, time_limit_s=LIMIT_S)
TARGET = Path(__file__).parent / "in_ranks.py"


def over_two(folder: Path, name: str = "workload") -> WorkerEvaluator:
    return WorkerEvaluator(Source(target=f"{TARGET}:{name}"), "cpu", folder / "workers.log", ranks=2)


@pytest.fixture
def evaluator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerEvaluator]:
    monkeypatch.setenv("NOTES", str(tmp_path))
    with over_two(tmp_path) as evaluator:
        yield evaluator


def measured(evaluator: WorkerEvaluator, effort: Effort = QUICK) -> Measurement:
    outcome = evaluator.measure(STOCK, effort)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def failed(evaluator: WorkerEvaluator, batch_size: int, effort: Effort = QUICK) -> Failure:
    outcome = evaluator.measure(Policy(batch_size=batch_size), effort)
    assert isinstance(outcome, Failure), outcome
    return outcome


def ranks_of(evaluator: WorkerEvaluator) -> list[psutil.Process]:
    """The processes of each running worker: itself and its followers."""
    identities = [worker.identity for worker in evaluator._workers.values() if worker.runs]
    workers = [psutil.Process(one.pid) for one in identities if one is not None]
    return [process for worker in workers for process in (worker, *worker.children())]


def assert_end(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert alive == []


@pytest.mark.parametrize("in_loop", [False, True], ids=["batches on the device", "in the loop"])
def test_ranks_train_on_batches_of_their_own_and_have_the_same_weights_after_each_step(
    evaluator: WorkerEvaluator, tmp_path: Path, in_loop: bool
) -> None:
    outcome = measured(evaluator, replace(QUICK, in_loop=in_loop))
    assert (outcome.samples_per_step, outcome.devices) == (2 * how.WELL, 2)
    first, second = ((tmp_path / rank).read_text().split("\n") for rank in ("0", "1"))
    steps = [(one.split(), other.split()) for one, other in zip(first, second, strict=True) if one]
    assert len(steps) >= outcome.warmup_steps + len(outcome.step_ms)
    assert all(one[1] == other[1] for one, other in steps)
    assert all(one[0] != other[0] for one, other in steps)
    assert len({one[1] for one, _ in steps}) == len(steps)  # they do train


@pytest.mark.parametrize(
    ("batch_size", "kind", "words"),
    [
        (how.RAISES, "error", 'own mistake" (rank 1)'),
        (how.OUT_OF_MEMORY, "oom", "CUDA out of memory. Tried to allocate 20.00 GiB. (rank 1)"),
        (how.KILLED, "crash", "the process of rank 1 was ended by SIGKILL; its output is in "),
        (how.QUITS, "error", "the script ends here (rank 1)"),
        (how.FIRST_RAISES, "error", "the first rank's own mistake"),
    ],
)
def test_a_failure_of_any_rank_is_that_of_its_trial_alone(
    evaluator: WorkerEvaluator, batch_size: int, kind: str, words: str
) -> None:
    measured(evaluator)
    before = ranks_of(evaluator)
    failure = failed(evaluator, batch_size)
    assert failure.kind == kind
    assert words in failure.message
    assert_end(before)
    measured(evaluator)


def test_ranks_listen_for_this_host_alone(evaluator: WorkerEvaluator) -> None:
    measured(evaluator)
    sockets = [one for process in ranks_of(evaluator) for one in process.net_connections()]
    listening = [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]
    assert listening
    assert {*listening} == {"127.0.0.1"}


def test_ranks_listen_for_this_host_alone(evaluator: WorkerEvaluator) -> None:
    measured(evaluator)
    sockets = [one for process in ranks_of(evaluator) for one in process.net_connections()]
    listening = [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]
    assert listening
    assert {*listening} == {"127.0.0.1"}


def test_ranks_end_with_a_worker_that_is_killed_or_hangs_past_its_trials_time(evaluator: WorkerEvaluator) -> None:
    measured(evaluator)
    worker, follower = ranks_of(evaluator)
    worker.kill()
    assert_end([follower])
    measured(evaluator)
    before = ranks_of(evaluator)
    assert failed(evaluator, how.HANGS, replace(QUICK, time_limit_s=20.0)).kind == "timeout"
    assert_end(before)


@pytest.mark.parametrize("name", ["with_an_idle_part", "freezing"])
def test_weights_that_no_step_uses_or_that_are_frozen_are_not_waited_for(tmp_path: Path, name: str) -> None:
    with over_two(tmp_path, name) as evaluator:
        assert measured(evaluator).devices == 2
        processes = ranks_of(evaluator)
        assert len(processes) == 2
    assert_end(processes)


def test_a_loader_that_fails_in_another_rank_is_not_blamed_on_the_policy(tmp_path: Path) -> None:
    with over_two(tmp_path, "breaking_loader") as evaluator:
        outcome = evaluator.measure(STOCK, replace(QUICK, in_loop=True))
    assert isinstance(outcome, Failure)
    assert outcome.exception == LOADER_FAILED
    assert outcome.message.endswith("a shard cannot be read (rank 1)")


def test_a_launch_compiles_in_every_rank(evaluator: WorkerEvaluator, tmp_path: Path) -> None:
    compiled = Policy(compile="default")
    evaluator.launch([compiled])
    assert (tmp_path / "1").read_text()
    outcome = evaluator.measure(compiled, QUICK)
    assert isinstance(outcome, Measurement), outcome
    assert outcome.recompiled == 0
