"""Searching the batch size, on a machine whose memory is known; and telling of memory that is free for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated.recorded import RecordedEvaluator, recorded_ms
from test_pipeline import request_in

from amptune.errors import SpaceError
from amptune.measure.results.subject import Prepared
from amptune.policy.settings import Policy
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


def lighter_by(mib: float) -> Callable[[Policy], float]:
    return lambda policy: 5000.0 - (0.0 if policy.autocast == "off" else mib)


@pytest.mark.parametrize(
    ("freed_mib", "wanted", "told"),
    [
        (2000.0, {}, "the policy frees 2,000 of 5,000 MiB"),
        (20.0, {}, None),  # no more than two runs may differ by
        (-500.0, {}, None),
        (2000.0, {"global_batch": GlobalBatch(samples=128)}, None),
    ],
)
def test_memory_that_a_policy_frees_is_told_beside_it(
    tmp_path: Path, freed_mib: float, wanted: dict[str, Any], told: str | None
) -> None:
    decision, _ = tuned(tmp_path, budget_s=60, peak_mib=lighter_by(freed_mib), **wanted)
    found = [finding for finding in decision.findings if finding.code == "memory-freed"]
    assert [finding.message.split(":")[0] for finding in found] == ([] if told is None else [told])
    assert [finding.figures for finding in found] == [{"freed_mib": 2000.0, "peak_memory_mib": 3000.0}][: len(found)]
