"""What is told of torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from measurements import took

from amptune.measure.results.outcome import Failure, Outcome
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.plan.compile_costs import cold_s, compile_findings
from amptune.search.table.trial import Trial

EAGER = amp_recipe("fp16")
COMPILED = replace(EAGER, compile="default")


def findings_of(outcomes: Mapping[Policy, Outcome], winner: Policy) -> dict[str, Finding]:
    trials = [Trial(number=i, policy=p, outcome=o, seconds=1.0) for i, (p, o) in enumerate(outcomes.items())]
    return {finding.code: finding for finding in compile_findings(trials, winner)}


def test_what_compiling_will_take_goes_by_what_was_compiled() -> None:
    fp32 = Policy(compile="default")
    tried: dict[Policy, Outcome] = {EAGER: took(25.0), COMPILED: took(20.0, startup_s=44.0)}
    assert cold_s(EAGER, tried) == 0
    assert cold_s(replace(COMPILED, fused_optimizer=True), tried) == 0
    assert cold_s(fp32, tried) == 44
    assert cold_s(fp32, {}) == 30
    assert cold_s(replace(COMPILED, compile="max-autotune"), tried) == 300


def test_compiling_pays_after_as_many_steps_as_it_takes_to_win_its_time_back() -> None:
    outcomes = {STOCK: took(60.0), EAGER: took(25.0), COMPILED: took(20.0, startup_s=30.0)}
    found = findings_of(outcomes, COMPILED)
    assert found.keys() == {"compile-pays"}
    assert found["compile-pays"].figures == {"compile_s": 30.0, "pays_after_steps": 6000}
    assert "6,000 steps against fp16" in found["compile-pays"].message


def test_failures_are_counted_and_the_most_frequent_is_named() -> None:
    why = Failure(kind="unsupported", message="no Triton here")
    found = findings_of({EAGER: took(25.0), COMPILED: why, replace(COMPILED, fused_optimizer=True): why}, EAGER)
    assert found.keys() == {"compile-failed"}
    assert found["compile-failed"].figures == {"failed": 2, "of": 2}
    assert "no Triton here" in found["compile-failed"].message
