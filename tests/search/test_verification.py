"""Does a claim hold? Driven by recorded trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated.recorded import H200, RecordedEvaluator, recorded_ms

from amptune.errors import ClaimError, HardwareMismatchError, NothingFeasibleError
from amptune.measure.results.outcome import Failure
from amptune.policy.file_io import load, save
from amptune.policy.policy_file import Evidence, PolicyFile
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.plan.budget import Budget
from amptune.search.table.ratio import Ratio
from amptune.search.verification import Verification, claim_of, verify_with

BEST = amp_recipe("fp16", memory_format="channels_last", batch_size=128)
TRUE = recorded_ms("resnet50", STOCK) / recorded_ms("resnet50", BEST)


def claiming(
    speedup: float, *, policy: Policy = BEST, labels: Mapping[str, str] | None = None, **evidence: Any
) -> PolicyFile:
    found: Any = {"speedup": speedup, "baseline": {"policy": {"autocast": "off"}}, **evidence}
    return PolicyFile(policy=policy, name="resnet50", valid_for=labels or dict(H200.labels), evidence=found)


def verified(
    policy_file: PolicyFile, evaluator: RecordedEvaluator | None = None, seconds: float = 100.0
) -> Verification:
    evaluator = evaluator or RecordedEvaluator("resnet50", noise=0.002)
    budget = Budget(seconds=seconds, started=evaluator.clock(), clock=evaluator.clock)
    return verify_with(evaluator, policy_file, budget, lambda _: None)


def codes(found: Verification) -> list[str]:
    return [finding.code for finding in found.findings]


def test_a_true_claim_holds_with_both_figures() -> None:
    found = verified(claiming(TRUE))
    assert found.holds
    assert found.speedup is not None
    assert found.speedup.low <= TRUE * 1.005
    assert f"{found.speedup} measured here, {TRUE:g}× claimed" in str(found.findings[0])


def test_policy_and_baseline_are_measured_in_turn_each_in_a_process_of_its_own() -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.002)
    found = verified(claiming(TRUE), evaluator)
    assert (found.policy.rows, found.baseline.rows) == (len(evaluator.measured) // 2, len(evaluator.measured) // 2)
    assert len(evaluator.measured) >= 4
    assert all(len(set(contenders)) == len(contenders) == 2 for contenders in evaluator.launched)


def test_a_claim_that_is_hard_to_tell_is_measured_in_more_than_one_launch() -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.002)
    found = verified(claiming(TRUE / 0.98), evaluator)
    assert found.speedup is not None
    assert found.speedup.launches >= 2


@pytest.mark.parametrize(("factor", "holds"), [(1.015, True), (1.05, False)])
def test_a_claim_may_be_missed_by_two_percent_and_no_more(factor: float, *, holds: bool) -> None:
    assert verified(claiming(TRUE * factor)).holds is holds


def small(policy: Policy) -> float:
    return 3000.0 if policy.autocast == "fp16" else 5000.0


@pytest.mark.parametrize(("gain", "holds"), [(5 / 3, True), (1.6, True), (1.8, False)])
def test_a_claim_of_memory_is_held_against_the_memory_measured(gain: float, *, holds: bool) -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.002, peak_mib=small)
    found = verified(claiming(TRUE, objective="memory", gain=gain), evaluator)
    assert found.holds is holds
    assert f"; it uses 0.60 times the memory of the baseline, {1 / gain:.3g} times claimed" in str(found.findings[0])
    assert ("the interval does not reach" in str(found.findings[0])) is False


def test_energy_known_too_roughly_to_tell_leaves_the_claim_undecided() -> None:
    """The speed is known well, and met; of the energy one launch says nothing and another one five times as much."""
    claim = claim_of(claiming(1.0, objective="energy", gain=2.0))
    speed, rough = Ratio(value=1.0, low=0.99, high=1.01, launches=3), Ratio(value=1.2, low=0.5, high=2.9, launches=3)
    found = replace(verified(claiming(TRUE)), claim=claim, speedup=speed, gain=rough)
    assert found.undecided
    assert not found.holds
    assert replace(found, gain=Ratio(value=1.98, low=1.95, high=2.01, launches=3)).holds
    missed = replace(found, gain=Ratio(value=1.5, low=1.4, high=1.6, launches=3))
    assert not missed.holds
    assert not missed.undecided
    assert not claim.is_clear(speed, rough)
    assert claim.is_clear(Ratio(value=1.1, low=1.09, high=1.11, launches=3), missed.gain)


def test_an_objective_that_is_none_is_said_so() -> None:
    with pytest.raises(ClaimError, match=r"evidence\.objective is not what `amptune tune` writes"):
        verified(claiming(TRUE, objective="beauty"))


def test_a_claim_that_fails_says_what_changed() -> None:
    labels = {**dict(H200.labels), "torch": "2.9"}
    file = claiming(4.0, labels=labels, step_ms=recorded_ms("resnet50", BEST) / 1.6)
    found = verified(replace(file, evidence=Evidence(**{**file.evidence, "speedup": 4.0})))
    assert not found.holds
    assert codes(found)[:3] == ["does-not-hold", "policy-moved", "drift"]
    assert "ms when it was tuned: 1.6 times as long" in str(found.findings[1])
    assert "torch was 2.9 when this policy was tuned, and is 2.11 here" in str(found.findings[2])


def test_another_model_is_a_change_too() -> None:
    found = verified(claiming(TRUE, labels={**dict(H200.labels), "model": "sha256:other"}))
    (drift,) = (finding for finding in found.findings if finding.code == "drift")
    assert drift.figures["label"] == "model"
    assert str(drift).startswith("this policy was tuned on a model with other modules or parameter shapes; ")


def test_a_policy_that_fails_here_does_not_hold() -> None:
    oom = Failure(kind="oom", message="CUDA out of memory")
    evaluator = RecordedEvaluator("resnet50", interfere=lambda policy: oom if policy == BEST else None)
    found = verified(claiming(TRUE), evaluator)
    assert not found.holds
    assert codes(found)[0] == "policy-fails"


def test_a_baseline_that_fails_is_an_error() -> None:
    oom = Failure(kind="oom", message="CUDA out of memory")
    evaluator = RecordedEvaluator("resnet50", interfere=lambda policy: None if policy == BEST else oom)
    with pytest.raises(NothingFeasibleError, match=r"the baseline .* fails here: oom: CUDA out of memory"):
        verified(claiming(TRUE), evaluator)


def test_a_policy_that_keeps_the_baseline_holds_while_it_runs() -> None:
    found = verified(claiming(1.0, policy=Policy(batch_size=128)))
    assert found.holds
    assert found.speedup is not None
    assert (found.speedup.low, found.speedup.high) == (1.0, 1.0)
    for_memory = claiming(1.0, policy=Policy(batch_size=128), objective="memory", gain=1.0)
    once = verified(for_memory, seconds=0.0)
    assert once.holds
    assert codes(once)[0] == "holds"


def test_a_measurement_too_rough_to_tell_is_undecided_and_not_a_claim_that_holds() -> None:
    found = verified(claiming(TRUE), RecordedEvaluator("resnet50", noise=0.3), seconds=0.0)
    assert found.speedup is not None
    assert found.speedup.low < TRUE < found.speedup.high
    assert not found.holds
    assert codes(found)[0] == "undecided"


def test_a_claim_far_from_what_one_round_shows_does_not_hold() -> None:
    found = verified(claiming(50.0), seconds=0.0)
    assert codes(found)[0] == "does-not-hold"


def test_a_baseline_that_hangs_is_not_measured_within_the_budget() -> None:
    hangs = Failure(kind="timeout", message="no answer")
    evaluator = RecordedEvaluator("resnet50", interfere=lambda policy: hangs if policy.autocast == "off" else None)
    with pytest.raises(NothingFeasibleError, match="could not be measured within the budget"):
        verified(claiming(TRUE), evaluator)


@pytest.mark.parametrize("baseline", [{"policy": {"autocast": "int8"}}, {"step_ms": "abc"}, {"policy": None}])
def test_evidence_that_is_malformed_is_said_so(baseline: dict[str, Any]) -> None:
    with pytest.raises(ClaimError, match=r"evidence\.baseline is not what `amptune tune` writes"):
        verified(claiming(TRUE, baseline=baseline))


def test_a_file_without_a_claim_is_an_error() -> None:
    with pytest.raises(ClaimError, match=r"policy 'mine' claims nothing: there is no evidence\.speedup"):
        verified(PolicyFile(policy=BEST, name="mine"))


def test_other_hardware_is_an_error() -> None:
    with pytest.raises(HardwareMismatchError, match="NVIDIA-A100"):
        verified(claiming(TRUE, labels={"nvidia.com/gpu.product": "NVIDIA-A100"}))


def test_the_baseline_of_the_claim_is_the_one_measured(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.002)
    recipe = amp_recipe("fp16")
    true = recorded_ms("resnet50", recipe) / recorded_ms("resnet50", BEST)
    file = claiming(true, baseline={"policy": {"autocast": "fp16"}, "step_ms": recorded_ms("resnet50", recipe)})
    save(file, tmp_path / "policy.yaml")
    found = verified(load(tmp_path / "policy.yaml"), evaluator)
    assert found.holds
    assert {replace(policy, batch_size=None) for policy in evaluator.measured} == {
        recipe,
        replace(BEST, batch_size=None),
    }
