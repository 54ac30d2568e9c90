"""What ratios say of a claim, without a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tables import BF16, in_turn

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK
from amptune.search.claim import Answer, Claim, Comparison, Pair, Ratios
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Ratio

TWICE = Claim(policy=BF16, baseline=STOCK, speedup=2.0, step_ms=None, baseline_ms=None)
HALF_THE_MEMORY = replace(TWICE, speedup=1.0, objective=Objective("memory"), gain=2.0)
PAIR = Pair(claim=TWICE, policy=BF16, baseline=STOCK, device="cuda")


def ratio(value: float, share: float) -> Ratio:
    """A ratio whose interval reaches so far to both sides."""
    return Ratio(value=value, low=value * (1 - share), high=value * (1 + share), launches=3)


def told(value: float, share: float, *, later: float = 0.0, last: float | None = None) -> Comparison:
    """A ratio after a round. A later sitting adds `later` to its share; the last round shows the same unless given."""
    wider = ratio(value, share + later)
    return Comparison(here=ratio(value, share), later=wider, last=value if last is None else last)


MET, BELOW, REACHING = told(2.0, 0.01), told(1.8, 0.05), told(1.9, 0.05)
LATER_MAY_REACH, LAST_REACHES = told(1.8, 0.05, later=0.1), told(1.8, 0.05, last=2.0)


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
    rounds: Sequence[Comparison], answer: Answer, *, settled: bool
) -> None:
    """It is met by an interval above it, or by a narrow one whose middle reaches it. Two equal answers settle it."""
    ratios: list[Ratios] = [(one,) for one in rounds]
    assert (TWICE.answer(ratios), TWICE.is_settled(ratios)) == (answer, settled)


@pytest.mark.parametrize(
    ("speed", "memory", "answer"),
    [
        (MET, MET, "met"),
        (MET, told(2.0, 0.5), "open"),
        (MET, None, "open"),
        (told(0.5, 0.01), MET, "missed"),
        (MET, told(0.5, 0.01), "missed"),
    ],
)
def test_a_claim_of_memory_needs_both_ratios(speed: Comparison, memory: Comparison | None, answer: Answer) -> None:
    assert HALF_THE_MEMORY.answer([(speed, memory)] * 2) == answer


def test_a_policy_that_fails_in_one_round_has_no_ratio() -> None:
    oom = Failure(kind="oom", message="CUDA out of memory")
    assert PAIR.ratios(in_turn({STOCK: [10.0, 10.0], BF16: [5.0, oom]})) is None
