"""What people read: progress lines, tables and explanations."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from amptune.errors import ClaimError
from amptune.hardware.detect import probe
from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import STOCK, LossScale, Policy, amp_recipe
from amptune.report.explanation import explain, explain_for, machine_in_words
from amptune.report.progress import describe
from amptune.report.terminal import _parity_in_words, print_hardware
from amptune.search.decide.pareto import ParetoPoint
from amptune.search.events import TrialEnded
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.trial import Trial

MEASURED = Measurement(
    samples_per_step=32,
    step_ms=(10.0, 10.0),
    warmup_s=0.1,
    warmup_steps=8,
    peak_allocated_mib=100.0,
    peak_reserved_mib=120.0,
    losses=(2.3,),
)
BASELINE = Trial(number=0, policy=STOCK, outcome=MEASURED, seconds=1.0)


def test_a_trial_is_one_line_with_its_time_and_its_ratio() -> None:
    fast = Trial(number=1, policy=amp_recipe("bf16"), outcome=replace(MEASURED, step_ms=(5.0,)), seconds=1.0)
    line = describe(TrialEnded(trial=fast, best=fast, baseline=BASELINE, left_s=42.0))
    assert line == "[  42 s left]   2 *    5.000 ms  2.00× bf16"


@pytest.mark.parametrize(
    ("objective", "figure"), [(Objective("memory"), "      100 MiB"), (Objective("energy"), "   0.25 J")]
)
def test_a_trial_shows_what_is_to_be_least(objective: Objective, figure: str) -> None:
    trial = replace(BASELINE, outcome=replace(MEASURED, energy_j_per_sample=0.25))
    line = describe(TrialEnded(trial=trial, best=trial, baseline=trial, left_s=42.0, objective=objective))
    assert line == f"[  42 s left]   1 *   10.000 ms  1.00× {figure} stock PyTorch"


def test_a_failed_trial_says_its_kind_and_why() -> None:
    failed = Trial(number=3, policy=amp_recipe("fp16"), outcome=Failure(kind="oom", message="no memory"), seconds=1.0)
    line = describe(TrialEnded(trial=failed, best=BASELINE, baseline=BASELINE, left_s=9.0))
    assert line is not None
    assert line.split() == ["[", "9", "s", "left]", "4", "oom", "fp16:", "no", "memory"]


def test_machines_are_told_in_words_and_not_as_labels() -> None:
    gpu = {
        "nvidia.com/gpu.product": "NVIDIA-H200",
        "nvidia.com/gpu.memory": "143771",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
        "torch": "2.11",
        "cudnn": "9.19",
        "model": "sha256:0",
        "rack": "b7",
    }
    told = "NVIDIA H200 with 140 GiB, compute capability 9.0, torch 2.11, cuDNN 9.19, rack b7, this model"
    assert machine_in_words(gpu) == told
    cpu = {
        "kubernetes.io/arch": "amd64",
        "feature.node.kubernetes.io/cpu-model.vendor_id": "AMD",
        "feature.node.kubernetes.io/cpu-model.family": "25",
        "feature.node.kubernetes.io/cpu-model.id": "17",
        "feature.node.kubernetes.io/cpu-cpuid.AVX512BF16": "true",
    }
    assert machine_in_words(cpu) == "amd64 CPUs of AMD family 25 model 17 with AVX512BF16"
    assert machine_in_words({"nvidia.com/gpu.product": "X"}) == "X"


def test_a_policy_that_was_not_judged_is_provisional_for_that_reason() -> None:
    evidence: Any = {
        "provisional": True,
        "confidence": "likely",
        "findings": [{"code": "not-judged", "message": "why"}],
    }
    text = "\n".join(explain(PolicyFile(policy=STOCK, evidence=evidence)))
    assert "Provisional: the numerics gate did not judge it.\nwhy." in text


def test_what_the_recorded_page_does_not_show_is_explained_too() -> None:
    static = Policy(autocast="fp16", loss_scale=LossScale(init=128, static=True))
    assert "loss_scale: stays at 128." in explain(PolicyFile(policy=static))
    losers = [{"policy": {"autocast": name}, "lost": "behind by 20.0%"} for name in ("fp16", "off")]
    evidence: Any = {"finalists": losers, "tuned_on": "2026-11-21T05:00:00Z"}
    said = explain(PolicyFile(policy=amp_recipe("bf16"), evidence=evidence, valid_for={"torch": "2.11"}))
    assert "Why not fp16; stock PyTorch: behind by 20.0%." in said
    assert said[-1].endswith("batch size. Tuned on 2026-11-21.")
    kept = "\n".join(explain(tuned_for_memory(gain=1.0)))
    assert "no policy was shown to use less memory at 0.9 times the baseline's throughput." in kept


def tuned_for_memory(**more: Any) -> PolicyFile:
    evidence: Any = {
        "objective": "memory",
        "least_speed": 0.9,
        "baseline": {"policy": {"autocast": "off"}, "samples_per_s": 100.0, "peak_memory_mib": 1000},
        "samples_per_s": 95.0,
        "step_ms": 10.0,
        "peak_memory_mib": 610,
        "speedup": 0.95,
        "gain": 1.639,
        "gain_ci95": [1.639, 1.639],
        "ablation": {"autocast": {"value": "bf16", "buys": 1.639, "buys_ci95": [1.639, 1.639], "speed": 0.9}},
        "pareto": [
            point(amp_recipe("fp16"), 250.0, 900.0),
            point(amp_recipe("bf16"), 95.0, 610.0, judged=True),
            point(amp_recipe("bf16", memory_format="channels_last"), 80.0, 300.0),
        ],
        **more,
    }
    return PolicyFile(policy=amp_recipe("bf16", batch_size=16), evidence=evidence)


def point(policy: Policy, speed: float, mib: float, *, judged: bool = False) -> dict[str, Any]:
    return ParetoPoint(policy=policy, samples_per_s=speed, peak_memory_mib=mib, judged=judged).as_dict()


def test_another_objective_is_answered_from_the_file_with_what_it_costs() -> None:
    chosen, sentences = explain_for(tuned_for_memory(), Objective("memory", 0.75))
    assert chosen is not None
    assert chosen.policy.memory_format == "channels_last"
    text = "\n".join(sentences)
    for words in (
        "For memory, the least peak memory at 0.75 times the baseline's throughput, of the 3 policies on record",
        "Throughput: 80 samples/s, 0.80 times the baseline's.",
        "Peak memory: 300 MiB, 0.30 times the baseline's.",
        "Its throughput is 0.84 times that of the policy in this file.",
        "was not judged by the numerics gate, and rests on a single trial",
    ):
        assert words in text
    _, sentences = explain_for(tuned_for_memory(samples_per_s=70.0), Objective("memory", 0.75))
    assert "Its throughput is 0.84 times that of the policy in this file." in sentences
    trial = {"samples_per_s": 125.0, "peak_memory_mib": 1200}
    baseline = {"samples_per_s": 100.0, "peak_memory_mib": 1000, "trial": trial}
    chosen, sentences = explain_for(tuned_for_memory(baseline=baseline), Objective("memory", 0.75))
    assert chosen is not None
    assert chosen.policy == amp_recipe("bf16")
    assert "Throughput: 95 samples/s, 0.76 times the baseline's." in sentences
    assert "Peak memory: 610 MiB, 0.51 times the baseline's." in sentences
    _, sentences = explain_for(tuned_for_memory(), Objective("memory", 0.9))
    assert sentences[-1] == "That is the policy of this file."
    nothing, (answer,) = explain_for(tuned_for_memory(), Objective("memory", 5.0))
    assert nothing is None
    assert answer.endswith("none is fast enough.")


@pytest.mark.parametrize(
    ("file", "objective", "words"),
    [
        (PolicyFile(policy=STOCK), THROUGHPUT, "it has no evidence.pareto; `amptune tune` writes one"),
        (tuned_for_memory(), Objective("energy"), "the machine it was tuned on reported none"),
        (tuned_for_memory(pareto=[{"policy": 3}]), THROUGHPUT, "evidence.pareto is not what `amptune tune` writes"),
    ],
)
def test_a_file_that_does_not_hold_what_is_asked_says_so(file: PolicyFile, objective: Objective, words: str) -> None:
    with pytest.raises(ClaimError, match=words):
        explain_for(file, objective)


@pytest.mark.parametrize(
    "changes",
    [
        {"baseline": {"samples_per_s": "fast"}},
        {"baseline": {"samples_per_s": 0}},
        {"baseline": {"samples_per_s": 1.0, "peak_memory_mib": "little"}},
        {"pareto": [{"policy": {}, "samples_per_s": 1e6, "peak_memory_mib": 0}]},
        {"pareto": [{"policy": {"autocast": "bf15"}, "samples_per_s": 5.0, "peak_memory_mib": 1.0}]},
        {"pareto": [{"samples_per_s": 5.0, "peak_memory_mib": 1.0}]},
    ],
)
def test_figures_that_a_hand_has_changed_are_a_clear_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ClaimError, match=r"evidence(\.pareto)? is not what `amptune tune` writes: .") as raised:
        explain_for(tuned_for_memory(**changes), Objective("memory", 0.5))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "evidence",
    [
        {"objective": "memory", "gain": 0},
        {"objective": "memory", "gain": 2.0, "least_speed": -1},
        {"objective": "beauty", "ablation": {"autocast": {"buys": 2.0}}},
        {"objective": "memory", "gain": 1.5, "ablation": {"autocast": {"buys": 0}}},
        {"speedup": 2.0, "ablation": {"autocast": {}}},
        {"speedup": 2.0, "ablation": {"autocast": "a lot"}},
    ],
)
def test_evidence_that_a_hand_has_changed_is_a_clear_error(evidence: Any) -> None:
    with pytest.raises(ClaimError, match=r"evidence is not what `amptune tune` writes: ."):
        explain(PolicyFile(policy=STOCK, evidence=evidence))


def test_the_machine_is_told_a_fact_a_line() -> None:
    stream = io.StringIO()
    print_hardware(probe("cpu"), (), stream)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("cpu ")
    assert any(line.strip().startswith("torch: ") for line in lines)


def test_parity_is_told_by_what_is_known_of_it() -> None:
    """With another batch size losses cannot be compared, and the gate has judged all the same."""
    assert _parity_in_words({"share_of_allowed": 0.24}) == "of what the numerics gate allows, 24% is used"
    both = _parity_in_words({"loss_deviation": 0.01, "share_of_allowed": 0.24})
    assert both.startswith("losses of the first steps within 0.01")
    assert both.endswith("24% is used")


def test_a_finding_about_the_model_itself_says_so() -> None:
    assert str(Finding(code="breaks", message="it raises", module="")) == "the model itself: it raises"
    assert str(Finding(code="breaks", message="it raises", module="head")) == "head: it raises"
