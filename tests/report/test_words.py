"""What people read: progress lines, tables and explanations."""

from __future__ import annotations

import io
from dataclasses import replace

from amptune.hardware.probing import probe
from amptune.measure.outcome import Failure, Measurement
from amptune.policy.file import PolicyFile
from amptune.policy.settings import STOCK, Fp32Rule, LossScale, Policy, Reason, amp_recipe
from amptune.report.explaining import explain
from amptune.report.progress import describe, progress_for
from amptune.report.terminal import _parity_in_words, print_hardware
from amptune.search.events import SearchEnded, TrialEnded, TrialStarted
from amptune.search.trial import Trial

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


def test_a_failed_trial_says_its_kind_and_why() -> None:
    failed = Trial(number=3, policy=amp_recipe("fp16"), outcome=Failure(kind="oom", message="no memory"), seconds=1.0)
    line = describe(TrialEnded(trial=failed, best=BASELINE, baseline=BASELINE, left_s=9.0))
    assert line is not None
    assert line.split() == ["[", "9", "s", "left]", "4", "oom", "fp16:", "no", "memory"]


def test_off_a_terminal_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    with progress_for(stream) as observer:
        observer(TrialStarted(policy=STOCK))
        observer(SearchEnded(because="the budget for searching is spent", trials=3))
    assert stream.getvalue() == "search ended after 3 new trials: the budget for searching is spent\n"


def test_every_setting_of_a_policy_is_explained() -> None:
    policy = Policy(
        autocast="fp16",
        fp32_math="tf32",
        fp32_modules=(
            Fp32Rule(path="head", reason=Reason(saves_ms=0.41)),
            Fp32Rule(type="LayerNorm", cast_output=True),
        ),
        memory_format="channels_last",
        cudnn_benchmark=True,
        batch_size=32,
        accumulate=4,
        compile="default",
        fused_optimizer=True,
        loss_scale=LossScale(init=1024),
    )
    text = "\n".join(explain(PolicyFile(policy=policy)))
    for words in (
        "float16",
        "fp32_math tf32",
        "fp32_modules head: stays in FP32: keeping it out of autocast saves 0.41 ms a step",
        "type LayerNorm",
        "its output is cast back",
        "NHWC",
        "cudnn_benchmark true",
        "batch_size 32 per device, accumulated over 4 micro-batches",
        "torch.compile",
        "one kernel updates all parameters",
        "starts at 1024",
        "written by hand",
    ):
        assert words in text


def test_evidence_is_told_with_its_interval() -> None:
    evidence = {"step_ms": 5.0, "samples_per_s": 200.0, "speedup": 2.0, "speedup_ci95": [1.9, 2.1], "provisional": True}
    file = PolicyFile(policy=STOCK, evidence=evidence, valid_for={"torch": "2.11", "model": "sha256:0"})  # type: ignore[arg-type]
    text = "\n".join(explain(file))
    assert "2 times the speed of the baseline (95 % interval 1.9 to 2.1)" in text
    assert "Provisional" in text
    assert "Valid for torch 2.11." in text


def test_the_machine_is_told_a_fact_a_line() -> None:
    stream = io.StringIO()
    print_hardware(probe("cpu"), stream)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("cpu ")
    assert any(line.strip().startswith("torch: ") for line in lines)


def test_parity_is_told_by_what_is_known_of_it() -> None:
    """With another batch size losses cannot be compared, and the gate has judged all the same."""
    assert _parity_in_words({"share_of_allowed": 0.24}) == "of what the numerics gate allows, 24% is used"
    both = _parity_in_words({"loss_deviation": 0.01, "share_of_allowed": 0.24})
    assert both.startswith("losses of the first steps within 0.01")
    assert both.endswith("24% is used")
