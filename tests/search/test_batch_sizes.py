"""Searching the batch size, on a machine whose memory is known; and telling of memory that is free for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from measurements import took
from simulated.recorded import RecordedEvaluator, recorded_ms
from test_pipeline import request_in

from amptune.errors import SpaceError
from amptune.measure.results.outcome import Effort, Failure, Outcome
from amptune.measure.results.subject import Prepared
from amptune.policy.setting_effects import memory_of
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.batch_size.batch_sizes import NO_SIZES, BatchSizes, batch_sizes_for
from amptune.search.decide.decision import Decision
from amptune.search.pipeline import tune_with
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.space.global_batch import GlobalBatch

OWN = 128


def saturating(policy: Policy) -> float:
    """A step that has a fixed part, so that large batches pay, and in half precision pay more."""
    own_ms = recorded_ms("resnet50", policy)
    fixed = 0.2 if policy.autocast == "off" else 0.6
    return own_ms * (fixed + (1 - fixed) * (policy.batch_size or OWN) / OWN)


def tuned(
    folder: Path, *, budget_s: float = 400, peak_mib: Callable[[Policy], float] | None = None, **wanted: Any
) -> tuple[Decision, RecordedEvaluator]:
    evaluator = RecordedEvaluator("resnet50", noise=0.002, true_ms=saturating)
    evaluator.peak_mib = peak_mib or evaluator.peak_mib
    request = request_in(folder, evaluator.clock, trials=None, **wanted)
    request = replace(request, budget=replace(request.budget, seconds=budget_s))
    return tune_with(evaluator, request, lambda _: None), evaluator


def test_the_batch_sizes_of_a_global_batch_are_its_divisors_found_at_once() -> None:
    for samples in (1, 2, 36, 97, 1000):
        assert GlobalBatch(samples=samples).batch_sizes == tuple(n for n in range(1, samples + 1) if samples % n == 0)
    assert GlobalBatch(samples=10**12).batch_sizes[-2:] == (5 * 10**11, 10**12)


def test_a_global_batch_that_cannot_be_made_up_is_refused_with_sizes_that_can() -> None:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    wanted = Wanted(baseline=Policy(), pins={}, global_batch=GlobalBatch(samples=1000))
    with pytest.raises(SpaceError, match=r"--batch-size: .*125"):
        candidates_for(prepared, wanted)
    own = replace(prepared, subject=replace(prepared.subject, own_step=True))
    with pytest.raises(SpaceError, match="step of your own"):
        candidates_for(own, replace(wanted, global_batch=GlobalBatch(samples=256)))
    with pytest.raises(SpaceError, match="3 devices"):
        GlobalBatch(samples=1000, devices=3)


@pytest.mark.parametrize(("wanted", "pinned"), [(True, "off"), (False, "default"), (False, "max-autotune")])
def test_wishes_about_compiling_that_contradict_each_other_are_refused(pinned: str, *, wanted: bool) -> None:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    with pytest.raises(SpaceError, match=f"--set compile={pinned} contradict each other"):
        candidates_for(prepared, Wanted(baseline=Policy(), pins={"compile": pinned}, compile=wanted))


def test_a_global_batch_is_made_up_by_the_baselines_own_batches_too(tmp_path: Path) -> None:
    whole = GlobalBatch(samples=1024, devices=2)
    with pytest.raises(SpaceError, match="batches of 96"):
        tuned(tmp_path / "refused", baseline=Policy(batch_size=96), global_batch=whole)
    decision, _ = tuned(tmp_path / "kept", budget_s=60, baseline=Policy(batch_size=64), global_batch=whole)
    assert (decision.baseline.policy.batch_size, decision.baseline.policy.accumulate) == (64, 8)
    assert {(trial.policy.batch_size or 0) * trial.policy.accumulate for trial in decision.trials} == {512}
    (told,) = [finding for finding in decision.findings if finding.code == "global-batch"]
    assert told.message.endswith(" × 2 devices")
    assert told.figures["batch_size"] == decision.policy.batch_size


def test_the_largest_batch_is_looked_for_and_told_if_batch_sizes_are_searched(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.002)
    decision = tune_with(evaluator, request_in(tmp_path, evaluator.clock, trials=4, batch_size="auto"), lambda _: None)
    assert "largest-batch" in {finding.code for finding in decision.findings}


def test_where_nothing_is_known_of_memory_only_the_own_batch_is_searched(tmp_path: Path) -> None:
    class Blind(RecordedEvaluator):
        def prepare(self, limit_s: float) -> Prepared:
            return replace(super().prepare(limit_s), memory_mib=None)

    evaluator = Blind("resnet50", noise=0.002)
    request = request_in(tmp_path, evaluator.clock, trials=4, batch_size="auto")
    assert tune_with(evaluator, request, lambda _: None).policy.batch_size == OWN


class Counted:
    """A runner in which each sample takes 10 MiB beside 500 MiB; notes what ran and how long it might take."""

    def __init__(self, limit_mib: float) -> None:
        self.limit_mib = limit_mib
        self.ran: list[Policy] = []
        self.limits_s: list[float] = []

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        mib = 500 + 10.0 * (policy.batch_size or OWN)
        self.limits_s.append(effort.time_limit_s)
        self.ran.append(policy)
        return took(1.0, mib) if mib <= self.limit_mib else Failure(kind="oom", message="CUDA out of memory")


def sizes_of(
    limit_mib: float | None = 140_000.0,
    whole: GlobalBatch | None = None,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    left_s: float = 1000.0,
    **facts: Any,
) -> tuple[BatchSizes, Counted]:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    hardware = replace(prepared.hardware, device=device)
    prepared = replace(prepared, hardware=hardware, memory_mib=limit_mib, **facts)
    runner = Counted(limit_mib or math.inf)
    return batch_sizes_for(runner, amp_recipe("bf16"), prepared, whole, left_s=lambda: left_s), runner


def test_sizes_are_doubles_of_half_the_own_one_and_the_largest_that_ran() -> None:
    found, runner = sizes_of()
    largest = max(policy.batch_size or 0 for policy in runner.ran)
    assert largest >= 0.95 * (140_000 - 500) / 10
    assert found.sizes == (64, 128, 256, 512, 1024, 2048, 4096, 8192, largest)
    (told,) = found.findings
    assert told.message.startswith(f"bf16: largest batch {largest}: ")
    assert told.figures["batch_size"] == largest


def test_no_size_is_beyond_the_data() -> None:
    found, runner = sizes_of(most_samples=300)
    assert max(policy.batch_size or 0 for policy in runner.ran) == found.sizes[-1] == 300
    assert "the data set has 300 samples" in next(found.findings).message


def test_sizes_end_at_16_times_the_own_one_on_a_cpu() -> None:
    found, runner = sizes_of(device="cpu")
    assert found.sizes[-1] == 16 * OWN
    assert all((policy.batch_size or 0) % OWN == 0 for policy in runner.ran)


def test_a_global_batch_is_probed_at_its_divisors_with_gradients_accumulated() -> None:
    found, runner = sizes_of(whole=GlobalBatch(samples=3 * 512))
    assert all(3 * 512 % size == 0 for size in found.sizes)
    assert found.sizes[-1] == 3 * 512
    assert {policy.accumulate for policy in runner.ran} == {1, 2}


def test_a_probe_may_take_no_longer_than_there_is_time() -> None:
    _, runner = sizes_of(left_s=7.0)
    assert set(runner.limits_s) == {7.0}


def test_the_own_size_is_searched_also_if_it_did_not_fit_once() -> None:
    found, _ = sizes_of(1200.0)
    assert found.largest is not None
    assert (found.largest[1].batch_size or 0) < OWN == found.sizes[-1]


def test_nothing_runs_if_the_size_of_the_memory_is_unknown() -> None:
    found, runner = sizes_of(None)
    assert (found, runner.ran) == (NO_SIZES, [])


def test_every_choice_that_keeps_other_tensors_takes_a_memory_of_its_own() -> None:
    o2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
    others = Policy(weights="half"), o2, Policy(checkpoint=("layers",)), Policy(cuda_graphs=True)
    assert len({memory_of(policy) for policy in (STOCK, amp_recipe("fp16"), *others)}) == 6
