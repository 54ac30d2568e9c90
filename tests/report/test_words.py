"""What people read: progress lines, tables and explanations."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from measurements import took

from amptune.errors import ClaimError
from amptune.hardware.detect import probe
from amptune.measure.results.outcome import Failure
from amptune.policy.findings import Finding
from amptune.policy.policy_file import PolicyFile
from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import STOCK, LossScale, Policy, amp_recipe
from amptune.report.explanation import explain, machine_in_words
from amptune.report.progress import describe
from amptune.report.terminal import print_hardware
from amptune.search.events import TrialEnded
from amptune.search.table.objective import Objective
from amptune.search.table.trial import Trial

BASELINE = Trial(number=0, policy=STOCK, outcome=took(10.0, 100.0, energy_j_per_sample=0.25), seconds=1.0)
FAST = Trial(number=1, policy=amp_recipe("bf16"), outcome=took(5.0), seconds=1.0)
LOST = replace(FAST, outcome=took(50.0, abandoned=True))
FAILED = Trial(number=3, policy=amp_recipe("fp16"), outcome=Failure(kind="oom", message="no memory"), seconds=1.0)


@pytest.mark.parametrize(
    ("trial", "best", "objective", "words"),
    [
        (FAST, FAST, "throughput", "  2 *    5.000 ms  2.00× bf16"),
        (BASELINE, FAST, "throughput", "  1     10.000 ms  1.00× stock PyTorch"),
        (BASELINE, BASELINE, "memory", "  1 *   10.000 ms  1.00×       100 MiB stock PyTorch"),
        (BASELINE, BASELINE, "energy", "  1 *   10.000 ms  1.00×    0.25 J stock PyTorch"),
        (FAILED, BASELINE, "throughput", "  4   oom fp16: no memory"),
        (LOST, BASELINE, "throughput", "  2     50.000 ms  0.20× bf16 (ended early: far behind)"),
    ],
)
def test_a_trial_is_one_line_with_its_time_its_ratio_and_what_is_to_be_least(
    trial: Trial, best: Trial, objective: Any, words: str
) -> None:
    line = describe(
        TrialEnded(trial=trial, best=best, baseline=BASELINE.row, left_s=42.0, objective=Objective(objective))
    )
    assert line is not None
    assert line.split() == f"[  42 s left] {words}".split()


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"step_ms": 5.0}, "took 5 ms a step"),
        ({"failure": {"kind": "oom", "message": "no memory"}}, "failed"),
        ({"lost": "at most 0.2× the speed of the baseline (ended early)"}, "ended early"),
    ],
)
def test_the_amp_recipe_ran_failed_or_ended_early(figures: dict[str, Any], said: str) -> None:
    recipe = {"policy": policy_to_dict(amp_recipe("bf16")), **figures}
    file = PolicyFile(policy=STOCK, evidence={"amp_recipe": recipe})
    (sentence,) = [one for one in explain(file)["Measured"] if "AMP recipe" in one]
    assert said in sentence


def test_machines_are_told_in_words_and_not_as_labels() -> None:
    gpu = {"product": "NVIDIA-H200", "memory": "143771", "compute.major": "9", "compute.minor": "0"}
    gpu = {f"nvidia.com/gpu.{name}": value for name, value in gpu.items()}
    software = {"torch": "2.11", "cudnn": "9.19", "model": "sha256:0", "rack": "b7"}
    told = "NVIDIA H200 with 140 GiB, compute capability 9.0, torch 2.11, cuDNN 9.19, rack b7, this model"
    assert machine_in_words(gpu | software) == told
    cpu = {"model.vendor_id": "AMD", "model.family": "25", "model.id": "17", "cpuid.AVX512BF16": "true"}
    cpu = {f"feature.node.kubernetes.io/cpu-{name}": value for name, value in cpu.items()}
    told = "amd64 CPUs of AMD family 25 model 17 with AVX512BF16"
    assert machine_in_words({"kubernetes.io/arch": "amd64", **cpu}) == told
    assert machine_in_words({"nvidia.com/gpu.product": "X"}) == "X"


def test_what_the_recorded_page_does_not_show_is_explained_too() -> None:
    static = Policy(autocast="fp16", loss_scale=LossScale(init=128, static=True))
    assert "loss_scale: stays at 128." in explain(PolicyFile(policy=static))["Settings"]
    unjudged: Any = {
        "provisional": True,
        "confidence": "likely",
        "findings": [{"code": "not-judged", "message": "why"}],
    }
    text = "\n".join(explain(PolicyFile(policy=STOCK, evidence=unjudged))["Measured"])
    assert "Provisional: the answer is not confirmed, the numerics were not judged" in text
    assert text.index("Why.") > text.index("Provisional")
    losers = [{"policy": {"autocast": name}, "lost": "behind by 20.0%"} for name in ("fp16", "off")]
    evidence: Any = {"finalists": losers, "tuned_on": "2026-11-21T05:00:00Z"}
    said = explain(PolicyFile(policy=amp_recipe("bf16"), evidence=evidence, valid_for={"torch": "2.11"}))
    assert said["Why not another"] == ("fp16; stock PyTorch: behind by 20.0%.",)
    assert said["Where it holds"][-1].endswith("batch size. Tuned on 2026-11-21.")
    for_memory: Any = {"objective": "memory", "speedup": 1.02, "gain": 1.6, "gain_ci95": [1.58, 1.62]}
    for_memory["ablation"] = {"autocast": {"buys": 1.6, "speed": 1.02}}
    told = explain(PolicyFile(policy=STOCK, evidence=for_memory))
    compared = "Uses 0.62 [0.62, 0.63] times the memory of the baseline at 1.020 times its throughput"
    assert told["Measured"] == (
        f"{compared}.",
        "autocast makes its peak memory 0.62×, and its speed 1.02× that without.",
    )


@pytest.mark.parametrize(
    "evidence",
    [
        {"objective": "memory", "gain": 0},
        {"objective": "memory", "gain": 2.0, "least_speed": -1},
        {"objective": "beauty", "ablation": {"autocast": {"buys": 2.0}}},
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


def test_a_finding_is_told_by_its_module() -> None:
    assert str(Finding(code="breaks", message="it raises", module="")) == "the model itself: it raises"
    assert str(Finding(code="breaks", message="it raises", module="head")) == "head: it raises"
