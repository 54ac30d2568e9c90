"""Steps over two real processes on the CPU, which exchange gradients by gloo: replicas by DDP, shards by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import misbehaving as how
import psutil
import pytest

from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Measurement
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Fp32Rule, Policy

pytestmark = pytest.mark.timeout(600)

# Of all that must succeed, on a slow and busy machine too.
LIMIT_S = 240.0
QUICK = Effort(warmup_s=0.05, measure_s=0.01, min_steps=3, time_limit_s=LIMIT_S)
TARGET = Path(how.__file__)
BF16 = Policy(autocast="bf16")


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTES", str(tmp_path))
    return tmp_path


def over_two(folder: Path, name: str) -> WorkerEvaluator:
    return WorkerEvaluator(Source(target=f"{TARGET}:{name}"), "cpu", folder / "workers.log", ranks=2)


@pytest.fixture
def evaluator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[WorkerEvaluator]:
    """Of the workload that a test's parameter names, if it names one."""
    with over_two(tmp_path, getattr(request, "param", "replicated")) as evaluator:
        yield evaluator


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("evaluator", [name], indirect=True)


def measured(evaluator: WorkerEvaluator, policy: Policy = STOCK, effort: Effort = QUICK) -> Measurement:
    outcome = evaluator.measure(policy, effort)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def failed(evaluator: WorkerEvaluator, policy: Policy = STOCK, effort: Effort = QUICK) -> Failure:
    outcome = evaluator.measure(policy, effort)
    assert isinstance(outcome, Failure), outcome
    return outcome


def lines(folder: Path, rank: int) -> list[str]:
    return (folder / str(rank)).read_text().splitlines()


def ranks_of(evaluator: WorkerEvaluator) -> list[psutil.Process]:
    """The processes of each running worker: itself and its followers."""
    identities = [worker.identity for worker in evaluator._workers.values() if worker.runs]
    workers = [psutil.Process(one.pid) for one in identities if one is not None]
    return [process for worker in workers for process in (worker, *worker.children())]


def assert_end(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert alive == []


def test_ranks_listen_for_this_host_alone(evaluator: WorkerEvaluator) -> None:
    measured(evaluator)
    sockets = [one for process in ranks_of(evaluator) for one in process.net_connections()]
    assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("in_loop", [False, True], ids=["batches on the device", "in the loop"])
def test_ranks_train_on_batches_of_their_own_and_have_the_same_weights_after_each_step(
    evaluator: WorkerEvaluator, notes: Path, in_loop: bool
) -> None:
    outcome = measured(evaluator, effort=replace(QUICK, in_loop=in_loop))
    assert (outcome.samples_per_step, outcome.devices) == (2 * how.WELL, 2)
    steps = [(one.split(), other.split()) for one, other in zip(lines(notes, 0), lines(notes, 1), strict=True)]
    assert len(steps) >= outcome.warmup_steps + len(outcome.step_ms)
    assert all(one[1] == other[1] for one, other in steps)
    assert all(one[0] != other[0] for one, other in steps)
    assert len({one[1] for one, _ in steps}) == len(steps)  # they do train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "kind", "words"),
    [
        (how.RAISES, "error", 'own mistake" (rank 1)'),
        (how.KILLED, "killed", "was ended by SIGKILL; its output is in "),
        (how.QUITS, "error", "the script ends here (rank 1)"),
        (how.FIRST_RAISES, "error", "the first rank's own mistake"),
    ],
)
def test_a_failure_of_any_rank_is_that_of_its_trial_alone(
    evaluator: WorkerEvaluator, batch_size: int, kind: str, words: str
) -> None:
    measured(evaluator)
    before = ranks_of(evaluator)
    failure = failed(evaluator, Policy(batch_size=batch_size))
    assert failure.kind == kind
    assert words in failure.message
    assert_end(before)
    measured(evaluator)


@pytest.mark.slow
def test_ranks_end_with_a_worker_that_is_killed_or_hangs_past_its_trials_time(evaluator: WorkerEvaluator) -> None:
    measured(evaluator)
    worker, follower = ranks_of(evaluator)
    worker.kill()
    assert_end([follower])
    measured(evaluator)
    before = ranks_of(evaluator)
    assert failed(evaluator, Policy(batch_size=how.HANGS), replace(QUICK, time_limit_s=20.0)).kind == "timeout"
    assert_end(before)


@pytest.mark.slow
@pytest.mark.parametrize("evaluator", ["with_an_idle_part", "freezing"], indirect=True)
def test_weights_that_no_step_uses_or_that_are_frozen_are_not_waited_for(evaluator: WorkerEvaluator) -> None:
    assert measured(evaluator).devices == 2
    assert len(ranks_of(evaluator)) == 2


@pytest.mark.slow
@of("breaking_loader")
def test_a_loader_that_fails_in_another_rank_is_not_blamed_on_the_policy(evaluator: WorkerEvaluator) -> None:
    outcome = failed(evaluator, effort=replace(QUICK, in_loop=True))
    assert outcome.exception == LOADER_FAILED
    assert outcome.message.endswith("a shard cannot be read (rank 1)")


@of("by_fsdp2")
def test_trials_train_a_sharded_model_each_from_the_same_weights_on_both_ranks(
    evaluator: WorkerEvaluator, notes: Path
) -> None:
    in_fp32 = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="block"),))
    outcomes = [measured(evaluator, policy) for policy in (STOCK, BF16, in_fp32, STOCK)]
    assert [(one.devices, one.samples_per_step) for one in outcomes] == [(2, 2 * how.WELL)] * 4
    first, *_, last = outcomes
    assert (first.losses[:3], first.gradient_norm) == (last.losses[:3], last.gradient_norm)
    begun = [line for rank in (0, 1) for line in lines(notes, rank) if line.startswith("Net ")]
    assert (len(begun), len(set(begun))) == (8, 1)
    trained = {line for rank in (0, 1) for line in lines(notes, rank)} - set(begun)
    assert trained == {"FSDPNet of DTensor"}
    with over_two(notes, "plain") as plain:
        usual = measured(plain)
    assert first.losses[:3] == pytest.approx(usual.losses[:3], rel=1e-5)
    assert first.gradient_norm == pytest.approx(usual.gradient_norm, rel=1e-5)


@of("clipped")
def test_sharded_gradients_are_scaled_and_clipped_and_micro_batches_added_up(evaluator: WorkerEvaluator) -> None:
    outcome = measured(evaluator, Policy(autocast="fp16", accumulate=2, fused_optimizer=True))
    assert outcome.samples_per_step == 2 * 2 * how.WELL
    assert 0 < outcome.skipped_share < 1  # the first scale is too large, on both ranks


@of("by_fsdp2")
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy(memory_format="channels_last"), "FSDP2 shards contiguous weights alone, and first.weight is not"),
        (Policy(weights="half", master_weights=True), "weights: half holds whole weights in half, and FSDP2 shards"),
    ],
)
def test_a_policy_that_fsdp2_refuses_fails_alone(evaluator: WorkerEvaluator, policy: Policy, said: str) -> None:
    failure = failed(evaluator, policy)
    assert failure.kind == "unsupported"
    assert said in failure.message
    measured(evaluator)


@of("breaks_in_rank_1")
def test_weights_that_break_in_another_ranks_part_are_the_trials_failure(evaluator: WorkerEvaluator) -> None:
    failure = failed(evaluator)
    assert failure.kind == "nonfinite"
    assert failure.message.startswith("weight idle.weight is not finite after ")
    assert failure.message.endswith(" steps (rank 1)")


@pytest.mark.parametrize(
    ("evaluator", "policy", "said"),
    [
        ("returns_nothing", STOCK, "parallel(model, tuned) returned NoneType, not a torch.nn.Module: return the model"),
        ("wraps_another", Policy(compile="default"), "returned a DistributedDataParallel without tuned.model in it"),
    ],
    indirect=["evaluator"],
)
def test_a_mistake_in_how_it_is_wrapped_is_told(evaluator: WorkerEvaluator, policy: Policy, said: str) -> None:
    failure = failed(evaluator, policy)
    assert failure.kind == "error"
    assert said in failure.message
