"""A training that is short ends before a graph has won back what compiling it took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from measurements import took
from tables import BF16, FP16, row
from test_pipeline import request_in
from test_trials import Behind, waiting_for_the_host

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Policy
from amptune.search.decide.decision import Decision
from amptune.search.pipeline import tune_with
from amptune.search.table.late_start import late_starts
from amptune.search.table.objective import Objective

GRAPH = BF16.compiled("reduce-overhead")
ROWS = [
    row(STOCK, took(20.0, startup_s=9.0)),  # of a process's first trial, which loads what all need
    row(BF16, took(10.0, startup_s=0.3)),
    row(GRAPH, took(8.0, startup_s=40.0)),
    row(GRAPH, took(8.0, startup_s=1.0)),  # from the compiler's cache
    row(FP16, Failure(kind="oom", message="gone")),
]


@pytest.mark.parametrize(("steps", "late"), [(1, True), (19_000, True), (21_000, False)])
def test_a_graph_has_to_win_back_what_compiling_it_took(steps: int, late: bool) -> None:
    found = late_starts(ROWS, STOCK, steps)
    assert set(found) == ({GRAPH} if late else set())
    if late:
        assert str(found[GRAPH]) == f"starting takes 40 s, which {steps:,} steps do not win back from {BF16}"
        assert found[GRAPH].speedup == pytest.approx(1.25)


def test_a_larger_batch_takes_fewer_steps_of_the_same_training() -> None:
    """In 12,000 steps of the baseline, half as many: 40 s in place of twice 60."""
    large = replace(GRAPH, batch_size=64)
    rows = [*ROWS[:2], row(large, took(8.0, samples_per_step=2 * took(1.0).samples_per_step, startup_s=40.0))]
    assert not late_starts(rows, STOCK, 12_000)
    assert set(late_starts(rows, STOCK, 6_000)) == {large}


def tuned(folder: Path, steps: int | None) -> Decision:
    evaluator = Behind("resnet50", noise=0.002, graphs_at_once=4)
    evaluator.compile_s, evaluator.true_ms = 30.0, waiting_for_the_host
    request = replace(request_in(folder, evaluator.clock), objective=Objective(steps=steps))
    return tune_with(evaluator, replace(request, budget=replace(request.budget, seconds=180.0)), lambda _: None)


def is_compiled(policy: Policy) -> bool:
    return policy.compile != "off"


def test_a_short_training_is_tuned_without_a_graph_and_a_long_one_with_it(tmp_path: Path) -> None:
    short, long = tuned(tmp_path / "short", 100), tuned(tmp_path / "long", 10_000_000)
    assert (is_compiled(short.policy), is_compiled(long.policy)) == (False, True)
    [late] = [finding for finding in short.findings if finding.code == "starts-late"]
    assert "times as fast, but starting takes" in late.message
    assert late.figures["steps"] == 100
    assert not any(finding.code == "starts-late" for finding in long.findings)
