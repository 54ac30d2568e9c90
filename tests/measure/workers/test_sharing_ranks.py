"""Steps over two processes whose workload says how they share the model: by FSDP2, or by DDP with options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sharing_ranks

from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Failure, Measurement
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Fp32Rule, Policy

pytestmark = pytest.mark.timeout(600)

QUICK = Effort(warmup_s=0.05, measure_s=0.01, min_steps=3, time_limit_s=240.0)
TARGET = Path(sharing_ranks.__file__)
BF16, FP16 = Policy(autocast="bf16"), Policy(autocast="fp16")


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTES", str(tmp_path))
    return tmp_path


def over_two(folder: Path, name: str) -> WorkerEvaluator:
    return WorkerEvaluator(Source(target=f"{TARGET}:{name}"), "cpu", folder / "workers.log", ranks=2)


@pytest.fixture
def evaluator(tmp_path: Path) -> Iterator[WorkerEvaluator]:
    with over_two(tmp_path, "by_fsdp2") as evaluator:
        yield evaluator


def measured(evaluator: WorkerEvaluator, policy: Policy = STOCK) -> Measurement:
    outcome = evaluator.measure(policy, QUICK)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def failed(evaluator: WorkerEvaluator, policy: Policy = STOCK) -> Failure:
    outcome = evaluator.measure(policy, QUICK)
    assert isinstance(outcome, Failure), outcome
    return outcome


def lines(folder: Path, rank: int) -> list[str]:
    return (folder / str(rank)).read_text().splitlines()


def test_trials_train_a_sharded_model_each_from_the_same_weights_on_both_ranks(
    evaluator: WorkerEvaluator, notes: Path
) -> None:
    in_fp32 = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="blocks.0"),))
    outcomes = [measured(evaluator, policy) for policy in (STOCK, BF16, in_fp32, STOCK)]
    assert [(one.devices, one.samples_per_step) for one in outcomes] == [(2, 2 * sharing_ranks.SIZE)] * 4
    first, *_, last = outcomes
    assert (first.losses[:3], first.gradient_norm) == (last.losses[:3], last.gradient_norm)
    begun = [line for rank in (0, 1) for line in lines(notes, rank) if line.startswith("Net ")]
    assert (len(begun), len(set(begun))) == (8, 1)
    trained = {line for rank in (0, 1) for line in lines(notes, rank)} - set(begun)
    assert trained == {"FSDPNet of DTensor"}


def test_sharded_training_computes_what_ddp_does(evaluator: WorkerEvaluator, tmp_path: Path) -> None:
    with over_two(tmp_path, "plain") as plain:
        usual = measured(plain)
    sharded = measured(evaluator)
    assert sharded.losses[:3] == pytest.approx(usual.losses[:3], rel=1e-5)
    assert sharded.gradient_norm == pytest.approx(usual.gradient_norm, rel=1e-5)


def test_sharded_gradients_are_scaled_and_clipped_and_micro_batches_added_up(tmp_path: Path) -> None:
    with over_two(tmp_path, "clipped") as evaluator:
        outcome = measured(evaluator, Policy(autocast="fp16", accumulate=2, fused_optimizer=True))
    assert outcome.samples_per_step == 2 * 2 * sharing_ranks.SIZE
    assert 0 < outcome.skipped_share < 1  # the first scale is too large, on both ranks


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


def test_pytorchs_own_fully_shard_may_be_called_too(tmp_path: Path) -> None:
    with over_two(tmp_path, "by_pytorch") as evaluator:
        assert measured(evaluator, BF16).devices == 2


def test_weights_that_break_in_another_ranks_part_are_the_trials_failure(tmp_path: Path) -> None:
    with over_two(tmp_path, "breaks_in_rank_1") as evaluator:
        failure = failed(evaluator)
    assert failure.kind == "nonfinite"
    assert failure.message.startswith("weight idle.weight is not finite after ")
    assert failure.message.endswith(" steps (rank 1)")


def test_a_wrapper_with_options_is_what_the_loss_gets(tmp_path: Path, notes: Path) -> None:
    with over_two(tmp_path, "by_ddp") as evaluator:
        assert measured(evaluator).devices == measured(evaluator, FP16).devices == 2
    assert set(lines(notes, 1)) == {"DistributedDataParallel of Tensor"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "'no such mesh'"),
        ("returns_nothing", "parallel(model, tuned) returned NoneType, not a torch.nn.Module: return the model after"),
    ],
)
def test_a_mistake_in_it_is_told(tmp_path: Path, name: str, said: str) -> None:
    with over_two(tmp_path, name) as evaluator:
        failure = failed(evaluator)
    assert failure.kind == "error"
    assert failure.message.startswith(said)
    if name == "raises":
        line = next(at for at, line in enumerate(TARGET.read_text().splitlines(), 1) if "no such mesh" in line)
        assert failure.where == f"{TARGET}:{line}"
