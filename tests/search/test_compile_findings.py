"""What is told of torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from measurements import took

from amptune.measure.results.outcome import Failure, Outcome
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.compile_findings import compile_findings
from amptune.search.table.trial import Trial

EAGER = amp_recipe("fp16")
COMPILED = replace(EAGER, compile="default")


def findings_of(outcomes: Mapping[Policy, Outcome], winner: Policy) -> dict[str, Finding]:
    trials = [Trial(number=i, policy=p, outcome=o, seconds=1.0) for i, (p, o) in enumerate(outcomes.items())]
    return {finding.code: finding for finding in compile_findings(trials, winner)}


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


def test_what_breaks_a_graph_is_told_where_an_eager_policy_won() -> None:
    broken = took(40.0, graph_breaks=("print in forward",), recompiled=3)
    found = findings_of({EAGER: took(20.0), COMPILED: broken}, EAGER)
    assert found.keys() == {"graph-breaks", "recompiles"}
    assert "print in forward" in found["graph-breaks"].message


def test_of_a_graph_that_saves_no_time_or_came_from_the_cache_nothing_is_told() -> None:
    assert not findings_of({EAGER: took(20.0), COMPILED: took(21.0, startup_s=30.0)}, COMPILED)
    assert not findings_of({EAGER: took(20.0), COMPILED: took(10.0, startup_s=0.2)}, COMPILED)
