"""What figures say of a claim, without a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tables import BF16, in_turn

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK
from amptune.search.claim import Answer, Claim, Figure, answer_of, is_settled
from amptune.search.table.effects import GPU
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Ratio

TWICE = Claim(policy=BF16, baseline=STOCK, speedup=2.0, step_ms=None, baseline_ms=None)
HALF_THE_MEMORY = replace(TWICE, speedup=1.0, objective=Objective("memory"), gain=2.0)
NEEDED = 0.98 * 2.0


def ratio(value: float, share: float) -> Ratio:
    """A ratio whose interval reaches so far to both sides."""
    return Ratio(value=value, low=value * (1 - share), high=value * (1 + share), launches=3)


def told(value: float, share: float, *, later: float = 0.0, last: float | None = None) -> Figure:
    """A ratio after a round. A later sitting adds `later` to its share; the last round shows the same unless given."""
    wider, alone = ratio(value, share + later), ratio(value if last is None else last, share)
    return Figure(name="speed", needed=NEEDED, here=ratio(value, share), later=wider, last=alone)


MET, BELOW, REACHING = told(2.0, 0.01), told(1.8, 0.05), told(1.9, 0.05)
LATER_MAY_REACH, LAST_REACHES = told(1.8, 0.05, later=0.1), told(1.8, 0.05, last=2.0)
NOT_MEASURED = Figure(name="energy", needed=NEEDED)


@pytest.mark.parametrize(
    ("rounds", "answer", "settled"),
    [
        ([MET], "met", False),
        ([told(1.97, 0.001)], "met", False),  # within 2 % of the claim
        ([told(2.0, 0.09)], "met", False),  # the interval reaches far below, but is narrow
        ([told(2.0, 0.11)], "open", False),  # too wide
        ([told(4.0, 0.5)], "met", False),  # wide, and all of it above
        ([told(1.95, 0.05)], "open", False),  # the interval reaches it, its middle does not
        ([BELOW], "open", False),  # missed once
        ([BELOW, BELOW], "missed", True),
        ([BELOW, REACHING], "open", False),
        ([REACHING, BELOW, BELOW], "missed", True),
        ([BELOW, LATER_MAY_REACH], "open", False),
        ([BELOW, LAST_REACHES], "open", False),
        ([BELOW, MET], "met", False),
        ([BELOW, MET, MET], "met", True),
        ([MET, BELOW], "open", False),
    ],
)
def test_a_claim_is_met_by_one_round_and_missed_by_two_in_a_row(
    rounds: Sequence[Figure], answer: Answer, *, settled: bool
) -> None:
    """It is met by an interval above it, or by a narrow one whose middle reaches it. Two equal answers settle it."""
    figures = [(one,) for one in rounds]
    assert (answer_of(figures), is_settled(figures)) == (answer, settled)


@pytest.mark.parametrize(
    ("speed", "memory", "answer"),
    [
        (MET, MET, "met"),
        (MET, told(2.0, 0.5), "open"),
        (MET, NOT_MEASURED, "open"),
        (told(0.5, 0.01), MET, "missed"),
        (MET, told(0.5, 0.01), "missed"),
    ],
)
def test_a_claim_of_memory_needs_both_figures(speed: Figure, memory: Figure, answer: Answer) -> None:
    assert answer_of([(speed, memory)] * 2) == answer


def test_where_nothing_is_claimed_two_rounds_and_a_narrow_interval_are_enough() -> None:
    narrow, wide = (replace(one, needed=None) for one in (MET, told(2.0, 0.5)))
    rounds = [[(narrow,)], [(wide,), (wide,)], [(wide,), (narrow,)]]
    assert [(answer_of(one), is_settled(one)) for one in rounds] == [("met", False), ("met", False), ("met", True)]


def test_a_claim_needs_its_figures_less_two_percent_and_of_a_policy_that_failed_there_are_none() -> None:
    rows = in_turn({STOCK: [10.0] * 3, BF16: [5.0] * 3})
    figures = HALF_THE_MEMORY.figures(rows, GPU)
    assert figures is not None
    assert [(one.name, one.needed) for one in figures] == [("speed", 0.98), ("memory", 1.96)]
    assert figures[0].is_met
    oom = Failure(kind="oom", message="CUDA out of memory")
    assert TWICE.figures(in_turn({STOCK: [10.0, 10.0], BF16: [5.0, oom]}), GPU) is None
