"""Which findings are shown beside the answer, and in which order."""

from __future__ import annotations

from amptune.policy.findings import Finding
from amptune.report.important_findings import MOST_SHOWN, important, ranked

FASTER = Finding(code="faster", message="bf16: 2×")
BLOCKS = Finding(code="throttled", message="3 of 9 blocks were discarded", figures={"discarded": 3, "kept": 0, "of": 9})
NOISY = Finding(code="noisy", message="repeats of the same policy varied by 9%")
NOT_JUDGED = Finding(code="not-judged", message="there was no time")
PAYS = Finding(code="compile-pays", message="compiling took 30 s")


def test_what_says_whether_to_trust_the_answer_comes_first_and_what_changes_nothing_last() -> None:
    found = ranked([BLOCKS, PAYS, NOISY, NOT_JUDGED, FASTER])
    assert found == [FASTER, NOT_JUDGED, PAYS, BLOCKS, NOISY]


def test_the_number_of_discarded_blocks_and_what_the_answer_says_already_are_not_shown() -> None:
    assert important([BLOCKS, PAYS, NOISY, NOT_JUDGED, FASTER]) == [NOT_JUDGED, PAYS]


def test_of_many_findings_the_most_important_are_shown() -> None:
    assert important([PAYS] * 20 + [NOT_JUDGED]) == [NOT_JUDGED, *[PAYS] * (MOST_SHOWN - 1)]
