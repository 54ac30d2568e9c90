"""A training that is short ends before a graph has won back what compiling it took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from measurements import took
from tables import BF16, FP16, row
from test_trials import searched_behind

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK
from amptune.search.table.late_start import late_starts
from amptune.search.table.objective import Objective

GRAPH = BF16.compiled("reduce-overhead")
LARGE = replace(GRAPH, batch_size=64)
ROWS = [
    row(STOCK, took(20.0, startup_s=9.0)),  # of a process's first trial, which loads what all need
    row(BF16, took(10.0, startup_s=0.3)),
    row(GRAPH, took(8.0, startup_s=40.0)),
    row(GRAPH, took(8.0, startup_s=1.0)),  # from the compiler's cache
    row(FP16, Failure(kind="oom", message="gone")),
]
# In 12,000 steps of the baseline, half as many: 40 s in place of twice 60.
IN_LARGE = [*ROWS[:2], row(LARGE, took(8.0, samples_per_step=2 * took(1.0).samples_per_step, startup_s=40.0))]


@pytest.mark.parametrize(
    ("rows", "steps", "late"),
    [
        (ROWS, 19_000, {GRAPH}),
        (ROWS, 21_000, set()),
        (IN_LARGE, 12_000, set()),
        (IN_LARGE, 6_000, {LARGE}),
        (ROWS[1:], 10, set()),  # nothing is known of the baseline
        (ROWS, None, set()),
    ],
)
def test_a_graph_has_to_win_back_what_compiling_it_took(rows: list[object], steps: int | None, late: set[str]) -> None:
    found = late_starts(rows, STOCK, steps)  # type: ignore[arg-type]
    assert set(found) == late
    if GRAPH in found:
        assert str(found[GRAPH]) == f"starting takes 40 s, which {steps:,} steps do not win back from {BF16}"
        assert found[GRAPH].speedup == pytest.approx(1.25)


@pytest.mark.parametrize(("steps", "compiled"), [(100, False), (10_000_000, True)])
def test_a_short_training_is_tuned_without_a_graph_and_a_long_one_with_it(
    steps: int, compiled: bool, tmp_path: Path
) -> None:
    _, decision, _ = searched_behind(tmp_path, objective=Objective(steps=steps))
    assert (decision.policy.compile != "off") is compiled
    late = [finding.figures["steps"] for finding in decision.findings if finding.code == "starts-late"]
    assert late == ([] if compiled else [steps])
