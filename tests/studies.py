"""Studies as a storage gives them back, of which a test names what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from measurements import took

from amptune.measure.results.outcome import Failure, Outcome
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Fp32Rule, Policy, Reason, amp_recipe
from amptune.search.gate.judgement import Judgement
from amptune.search.sampler.records import StudyRecord, TuningRecord
from amptune.search.table.objective import THROUGHPUT
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["BF16", "FP16", "LAST", "OOM", "OUTCOMES", "SMALL", "TUNING", "compared", "record", "rich"]

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
LAST = amp_recipe("bf16", memory_format="channels_last")
SMALL = replace(LAST, fused_optimizer=True)
OOM = Failure(kind="oom", message="CUDA <out> of memory & more", where="train.py:7")
OUTCOMES: dict[Policy, Outcome] = {
    STOCK: took(10.0, 1000.0, energy_j_per_sample=0.5),
    BF16: took(8.0, 700.0, energy_j_per_sample=0.4),
    LAST: took(4.0, 720.0, energy_j_per_sample=0.25),
    SMALL: took(9.0, 300.0, energy_j_per_sample=0.3),
    FP16: took(2.0, 500.0, energy_j_per_sample=0.2),
}
TUNING = TuningRecord(
    run="0",
    began="2026-11-21T05:00:00.000+00:00",
    workload='small <script>alert("x")</script>',
    target="train.py:small",
    folder=".amptune/small",
    hardware="NVIDIA H200",
    batch_size=32,
    baseline=STOCK,
    objective=THROUGHPUT,
    device="cuda",
)


def record(**changes: Any) -> StudyRecord:
    """Six trials: fp16 is the fastest and trains worse than FP32, one policy ran out of memory."""
    trials = [_trial(i, policy, outcome) for i, (policy, outcome) in enumerate(OUTCOMES.items())]
    trials.append(_trial(5, Policy(cudnn_benchmark=True), OOM))
    judged = (
        Judgement(policy=FP16, passes=False, used=3.0, words="fc: gradients overflow"),
        Judgement(policy=LAST, passes=True, used=0.12, words="as good as FP32"),
    )
    whole = StudyRecord(name="small-1", where="runs", tunings=(TUNING,), trials=tuple(trials), judged=judged)
    return replace(whole, **changes)


def compared(policies: Sequence[Policy] = (STOCK, BF16, LAST), rounds: int = 3) -> tuple[Row, ...]:
    """Each policy in turn, in a fresh process each round, as fast as in its trial."""
    return tuple(
        Row(policy=policy, outcome=OUTCOMES[policy], run="0", launch=f"comparison {launch}", moment_s=10.0 + launch)
        for launch in range(rounds)
        for _ in range(3)
        for policy in policies
    )


def rich() -> StudyRecord:
    """A study with all that a page shows: findings, disturbed blocks, versions, figures of the gate."""
    worst = Finding(
        code="gradient-error",
        message="the gradient of weight is off by 4%",
        module="body.7.attention.qkv",
        figures={"times_allowed": 0.12, "allowed": "30%", "parameter": "body.7.attention.qkv.weight"},
    )
    ruled = replace(
        LAST,
        fp32_modules=(Fp32Rule(path="body.*.norm", reason=Reason(saves_ms=0.41)),
                      Fp32Rule(path="head", reason=Reason(risk=31.0))),
    )  # fmt: skip
    hot = took(3.9, 720.0, losses=(2.31, 2.19, 2.1), contaminated_by=("sw-thermal",), discarded=("host-load",))
    plain = replace(took(10.0, 1000.0), losses=(2.3, 2.2, 2.1))
    trials = (*record().trials, _trial(6, ruled, hot), _trial(7, STOCK, plain))
    tuning = replace(
        TUNING,
        workload="ResNet-50",
        software=(("amptune", "0.1.0 (commit 0123456789)"), ("torch", "2.13.0"), ("driver", "580.1")),
        memory_mib=143771.0,
        valid_for=(("nvidia.com/gpu.product", "NVIDIA-H200"), ("model", "sha256:" + 64 * "0")),
    )
    words = "as good as FP32: 12% of what is allowed"
    judged = tuple(Judgement(policy=one, passes=True, used=0.12, words=words, worst=(worst,)) for one in (LAST, BF16))
    rows = [
        Row(policy=policy, outcome=outcome, run="0", launch=f"comparison {launch}", moment_s=20.0 + launch)
        for launch in range(4)
        for policy, outcome in ((STOCK, plain), (BF16, OUTCOMES[BF16]), (ruled, hot), (LAST, OUTCOMES[LAST]))
    ]
    findings = (
        Finding(code="input-bound", message="the loop waits for its data", figures={"share": 0.2}),
        Finding(code="own-load", message="the GPU ran at its power cap in 3 of 9 measurements; so will training"),
    )
    return record(
        tunings=(tuning,), trials=trials, judged=(record().judged[0], *judged), rows=tuple(rows), findings=findings
    )


def _trial(number: int, policy: Policy, outcome: Outcome) -> Trial:
    return Trial(number=number, policy=policy, outcome=outcome, seconds=1.0, run="0", moment_s=float(number))
