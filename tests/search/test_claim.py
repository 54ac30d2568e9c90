"""What ratios say of a claim, without a machine."""

from __future__ import annotations

import pytest
from tables import BF16, in_turn

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK
from amptune.search.claim import Answer, Claim, Comparison, Pair, Ratios
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Ratio

TWICE = Claim(policy=BF16, baseline=STOCK, speedup=2.0, step_ms=None, baseline_ms=None)
HALF_THE_MEMORY = Claim(
    policy=BF16, baseline=STOCK, speedup=1.0, step_ms=None, baseline_ms=None, objective=Objective("memory"), gain=2.0
)
PAIR = Pair(claim=TWICE, policy=BF16, baseline=STOCK, device="cuda")


def ratio(value: float, share: float) -> Ratio:
    """A ratio whose interval reaches so far to both sides."""
    return Ratio(value=value, low=value * (1 - share), high=value * (1 + share), launches=3)


def told(value: float, share: float, *, later: float = 0.0, last: float | None = None) -> Comparison:
    """A ratio after a round. A later sitting adds `later` to its share; the last round shows the same unless given."""
    wider = ratio(value, share + later)
    return Comparison(here=ratio(value, share), later=wider, last=value if last is None else last)


def rounds(*found: Comparison) -> list[Ratios]:
    return [(one,) for one in found]


@pytest.mark.parametrize(
    ("value", "share", "answer"),
    [
        (2.0, 0.001, "met"),
        (1.97, 0.001, "met"),  # within 2 % of the claim
        (2.0, 0.09, "met"),  # the interval reaches far below, but is narrow
        (2.0, 0.11, "open"),  # too wide
        (4.0, 0.5, "met"),  # wide, and all of it above
        (1.95, 0.05, "open"),  # the interval reaches it, its middle does not
        (1.8, 0.05, "open"),  # missed once
    ],
)
def test_a_claim_is_met_by_an_interval_above_it_or_by_a_narrow_one_whose_middle_reaches_it(
    value: float, share: float, answer: Answer
) -> None:
    assert TWICE.answer(rounds(told(value, share))) == answer


def test_a_claim_is_missed_by_two_rounds_in_a_row_below_it() -> None:
    below, reaching = told(1.8, 0.05), told(1.9, 0.05)
    assert TWICE.answer(rounds(below, below)) == "missed"
    assert TWICE.answer(rounds(below, reaching)) == "open"
    assert TWICE.answer(rounds(below, reaching, below)) == "open"
    assert TWICE.answer(rounds(reaching, below, below)) == "missed"
    assert TWICE.answer([]) == "open"


@pytest.mark.parametrize(
    "doubtful",
    [told(1.8, 0.05, later=0.1), told(1.8, 0.05, last=2.0)],
    ids=["a later sitting may reach it", "the last round reaches it"],
)
def test_what_may_be_an_accident_does_not_miss_a_claim(doubtful: Comparison) -> None:
    assert TWICE.answer(rounds(told(1.8, 0.05), doubtful)) == "open"
    assert TWICE.answer(rounds(doubtful, told(1.8, 0.05))) == "open"


def test_a_claim_of_memory_needs_both_ratios() -> None:
    good, bad, unclear = told(2.0, 0.01), told(0.5, 0.01), told(2.0, 0.5)
    assert HALF_THE_MEMORY.answer([(good, good)]) == "met"
    assert HALF_THE_MEMORY.answer([(good, unclear)]) == "open"
    assert HALF_THE_MEMORY.answer([(good, None)]) == "open"
    assert HALF_THE_MEMORY.answer([(bad, good)] * 2) == "missed"
    assert HALF_THE_MEMORY.answer([(good, bad)] * 2) == "missed"


def test_an_answer_is_settled_by_two_rounds_in_a_row() -> None:
    met, below = told(2.0, 0.01), told(1.5, 0.01)
    assert [TWICE.is_settled(rounds(*found)) for found in [(), (met,), (below,), (below, met), (met, below)]] == [
        False
    ] * 5
    assert TWICE.is_settled(rounds(below, met, met))
    assert TWICE.is_settled(rounds(met, below, below))


def test_a_pair_compares_this_sitting_more_narrowly_than_a_later_one() -> None:
    (found,) = PAIR.ratios(in_turn({STOCK: [10.0] * 4, BF16: [5.0] * 4}, spread=0.02)) or ()
    assert found is not None
    assert found.here.value == pytest.approx(2.0)
    assert found.here.half_width < 0.7 * found.later.half_width


def test_the_last_round_by_itself_says_what_it_measured() -> None:
    before, last = {STOCK: [10.0] * 3, BF16: [7.0] * 3}, {STOCK: [10.0], BF16: [5.0]}
    rows = [*in_turn(before), *in_turn(last, start_s=60.0)]
    (found,) = PAIR.ratios(rows) or ()
    assert found is not None
    assert found.last == pytest.approx(2.0)


def test_a_policy_that_fails_in_one_round_has_no_ratio() -> None:
    oom = Failure(kind="oom", message="CUDA out of memory")
    assert PAIR.ratios(in_turn({STOCK: [10.0, 10.0], BF16: [5.0, oom]})) is None
