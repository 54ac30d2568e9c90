"""Real worker processes, and a workload that misbehaves on demand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import misbehaving as how
import psutil
import pytest
from alike import trained_alike

from amptune.errors import TargetError, UserCodeError
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Failure, Measurement
from amptune.measure.results.training_runs import LossCurve
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy

# Of all that must succeed, on a slow and busy machine too; a whole test has 300 s.
LIMIT_S = 240.0
QUICK = Effort(warmup_s=0.1, measure_s=0.02, min_steps=3, time_limit_s=LIMIT_S)
TARGET = Path(how.__file__)


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEvaluator]:
    log = tmp_path_factory.mktemp("workers") / "workers.log"
    source = Source(target=f"{TARGET}:workload")
    with WorkerEvaluator(source, "cpu", log) as evaluator:
        assert 0 < evaluator.prepare(LIMIT_S).start_s < LIMIT_S
        yield evaluator


def measured(evaluator: WorkerEvaluator, policy: Policy) -> Measurement:
    outcome = evaluator.measure(policy, QUICK)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def failed(evaluator: WorkerEvaluator, batch_size: int, effort: Effort = QUICK) -> Failure:
    outcome = evaluator.measure(Policy(batch_size=batch_size), effort)
    assert isinstance(outcome, Failure), outcome
    return outcome


def test_a_policy_is_timed_trained_long_and_looped(evaluator: WorkerEvaluator) -> None:
    outcome = measured(evaluator, Policy(accumulate=3))
    assert outcome.samples_per_step == how.WELL  # a step of the user's own counts the one batch it is given
    assert len(outcome.step_ms) >= QUICK.min_steps
    assert outcome.peak_allocated_mib > 10
    curve = evaluator.train_long(STOCK, 5, seed=0, seconds=LIMIT_S)
    assert isinstance(curve, LossCurve), curve
    assert len(curve.losses) == 5
    looped = evaluator.measure_alone(STOCK, replace(QUICK, in_loop=True))
    assert isinstance(looped, Measurement)
    assert looped.in_loop


MISBEHAVING = {
    how.RAISES: ("error", "the user's own mistake"),
    how.NAN: ("nonfinite", "the loss is nan at step 1"),
    how.POISONS: ("nonfinite", "buffer norm.running_mean is not finite"),
    how.OUT_OF_MEMORY: ("oom", "CUDA out of memory"),
    how.UNSUPPORTED: ("unsupported", "not implemented for 'Half'"),
    how.EXITS: ("crash", "ended with exit code 3"),
    how.KILLED: ("killed", "was ended by SIGKILL"),
}


def pids(evaluator: WorkerEvaluator) -> set[int]:
    identities = [worker.identity for worker in evaluator._workers.values()]
    return {one.pid for one in identities if one is not None}


@pytest.mark.parametrize("batch_size", MISBEHAVING)
def test_every_failure_is_typed_and_costs_one_trial(evaluator: WorkerEvaluator, batch_size: int) -> None:
    before, failure, after = measured(evaluator, STOCK), failed(evaluator, batch_size), measured(evaluator, STOCK)
    kind, words = MISBEHAVING[batch_size]
    assert failure.kind == kind
    assert words in failure.message
    assert trained_alike(before, after)


def test_the_users_exception_has_its_place_and_its_prints_and_traceback_are_in_the_log(
    evaluator: WorkerEvaluator, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = failed(evaluator, how.RAISES)
    assert failure.exception == "KeyError"
    assert str(failure.where).startswith(str(TARGET))
    log = evaluator.log.read_text()
    assert 'KeyError: "the user\'s own mistake"' in log
    assert "the user prints in every step" in log
    assert "the user prints" not in capfd.readouterr().out


def test_a_worker_that_hangs_is_ended_at_its_time_limit(evaluator: WorkerEvaluator) -> None:
    measured(evaluator, STOCK)  # so that the worker runs already
    failure = failed(evaluator, how.HANGS, replace(QUICK, time_limit_s=5.0))
    assert failure.kind == "timeout"
    said = r"no answer within 5 s: .*; the worker was replaced, its output is in /.*workers.log"
    assert re.fullmatch(said, failure.message)
    measured(evaluator, STOCK)


def test_each_launch_gives_every_policy_a_fresh_process_and_each_cudnn_benchmark_setting_has_its_own(
    evaluator: WorkerEvaluator,
) -> None:
    policies = (STOCK, Policy(fp32_math="ieee"))
    evaluator.launch(policies)
    first = pids(evaluator)
    measured(evaluator, STOCK)
    assert pids(evaluator) == first
    evaluator.launch(policies)
    evaluator.launch(policies)
    assert len(first) == len(pids(evaluator)) == 2
    assert not first & pids(evaluator)
    evaluator.launch(())
    for policy in (*policies, Policy(cudnn_benchmark=True)):
        measured(evaluator, policy)
    assert len(pids(evaluator)) == 2


def test_workers_for_which_there_is_no_memory_take_turns(
    evaluator: WorkerEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amptune.measure.evaluator.workers_that_fit", lambda *_: 2)
    policies = [Policy(fp32_math="ieee"), Policy(fp32_math="tf32"), STOCK]
    evaluator.launch(policies)
    for policy in policies:
        measured(evaluator, policy)
        assert sum(worker.runs for worker in evaluator._workers.values()) <= 2


def test_a_policy_out_of_memory_is_tried_again_without_the_idle_workers(evaluator: WorkerEvaluator) -> None:
    evaluator.launch([STOCK, Policy(fp32_math="ieee")])
    failure = failed(evaluator, how.OUT_OF_MEMORY)
    assert failure.kind == "oom"
    assert sum(worker.runs for worker in evaluator._workers.values()) == 1


def test_what_compiles_goes_on_while_others_are_started_and_measured(evaluator: WorkerEvaluator) -> None:
    late = Policy(memory_format="channels_last")
    evaluator.begin_compiling(late, LIMIT_S)
    evaluator.launch([STOCK])
    measured(evaluator, STOCK)
    assert isinstance(evaluator.compiled(LIMIT_S)[late], float)
    measured(evaluator, late)


def test_what_compiles_stands_still_while_others_are_timed_and_goes_on(evaluator: WorkerEvaluator) -> None:
    late = Policy(compile="default", batch_size=how.HANGS)
    evaluator.begin_compiling(late, LIMIT_S)
    graph = evaluator._graphs[late]
    identity = graph.process.identity
    assert identity is not None
    measured(evaluator, STOCK)
    assert evaluator._beside(evaluator._worker(STOCK)) == (identity,)
    assert psutil.Process(identity.pid).status() != psutil.STATUS_STOPPED
    evaluator.begin_compiling(late, 1.0)  # again, with less time
    failure = evaluator.compiled(LIMIT_S)[late]
    assert isinstance(failure, Failure)
    assert failure.kind == "timeout"
    assert late not in evaluator.compiling


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("no_parameters", TargetError, "no parameters that require a gradient"),
        ("no_module", TargetError, "model() returned int, not a torch.nn.Module"),
        ("not_built", UserCodeError, "model() raised ZeroDivisionError"),
    ],
)
def test_a_workload_that_cannot_be_built_says_why(tmp_path: Path, name: str, kind: type, words: str) -> None:
    with WorkerEvaluator(Source(target=f"{TARGET}:{name}"), "cpu", tmp_path / "log") as evaluator:
        with pytest.raises(kind) as caught:
            evaluator.prepare(LIMIT_S)
        assert words in str(caught.value)


def test_a_workload_that_cannot_be_built_a_second_time_costs_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES", str(tmp_path))
    with WorkerEvaluator(Source(target=f"{TARGET}:once"), "cpu", tmp_path / "log") as evaluator:
        evaluator.prepare(LIMIT_S)
        failure = evaluator.measure(Policy(cudnn_benchmark=True), QUICK)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.message) == ("error", "the second build fails")
        measured(evaluator, STOCK)
