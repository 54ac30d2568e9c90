"""A training that is short ends before a graph has won back what compiling it took."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measurements import took
from tables import BF16, FP16, row

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Policy
from amptune.search.table.late_start import late_starts
from amptune.search.table.row import Row

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
def test_a_graph_has_to_win_back_what_compiling_it_took(rows: list[Row], steps: int | None, late: set[Policy]) -> None:
    found = late_starts(rows, STOCK, steps)
    assert set(found) == late
    if GRAPH in found:
        assert str(found[GRAPH]) == f"starting takes 40 s, which {steps:,} steps do not win back from {BF16}"
        assert found[GRAPH].speedup == pytest.approx(1.25)
