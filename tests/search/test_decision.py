from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from amptune.measure.outcome import Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe
from amptune.search.decision import Round, departure_count, ratio_of, settled, standings_of, verdict_of

AMP = amp_recipe("bf16")
AMP_LAST = amp_recipe("bf16", memory_format="channels_last")


def block(step_ms: float) -> Measurement:
    return Measurement(
        samples_per_step=32,
        step_ms=(step_ms,) * 5,
        warmup_s=0.1,
        warmup_steps=8,
        peak_allocated_mib=100.0,
        peak_reserved_mib=120.0,
        losses=(2.3, 2.2),
    )


def rounds_of(*columns: tuple[Policy, Sequence[float]]) -> list[Round]:
    return [{policy: block(times[i]) for policy, times in columns} for i in range(len(columns[0][1]))]


def test_the_fastest_policy_wins_when_every_round_shows_it() -> None:
    verdict = verdict_of(rounds_of((STOCK, [10.0, 10.1, 9.9]), (AMP, [5.0, 5.1, 4.9])), STOCK)
    assert verdict is not None
    assert verdict.winner.policy == AMP
    assert verdict.speedup.value == pytest.approx(2.0, rel=0.02)
    assert verdict.speedup.low > 1.9
    assert [finding.code for finding in verdict.findings] == ["faster"]


def test_no_difference_shown_keeps_the_baseline() -> None:
    verdict = verdict_of(rounds_of((STOCK, [10.0, 9.0, 11.0]), (AMP, [9.9, 10.5, 9.0])), STOCK)
    assert verdict is not None
    assert verdict.winner.policy == STOCK
    assert verdict.findings[0].code == "keep"


def test_among_equals_the_fewest_departures_win() -> None:
    rounds = rounds_of((STOCK, [10.0] * 4), (AMP_LAST, [5.0, 5.2, 4.9, 5.1]), (AMP, [5.1, 5.0, 5.1, 5.0]))
    verdict = verdict_of(rounds, STOCK)
    assert verdict is not None
    assert verdict.winner.policy == AMP
    assert {finding.code for finding in verdict.findings} == {"faster", "simplest"}


def test_drift_that_hits_all_policies_alike_claims_nothing() -> None:
    drift = [1.0, 0.95, 0.9, 0.86, 0.83]
    verdict = verdict_of(rounds_of((STOCK, [10 * d for d in drift]), (AMP, [10 * d for d in drift])), STOCK)
    assert verdict is not None
    assert verdict.winner.policy == STOCK


def test_one_round_alone_claims_nothing() -> None:
    verdict = verdict_of(rounds_of((STOCK, [10.0]), (AMP, [5.0])), STOCK)
    assert verdict is not None
    assert verdict.winner.policy == STOCK


def test_two_rounds_under_heavy_interference_claim_nothing() -> None:
    """Seen on a CPU that another process used: the baseline was hit in both rounds, its rival in one."""
    rounds = rounds_of((STOCK, [86.0, 88.0]), (AMP, [0.33, 54.0]))
    verdict = verdict_of(rounds, STOCK)
    assert verdict is not None
    assert verdict.winner.policy == STOCK


def test_a_policy_that_failed_once_stands_there_with_its_failure_and_cannot_win() -> None:
    failed: Outcome = Failure(kind="oom", message="CUDA out of memory")
    rounds: list[Round] = [{STOCK: block(10), AMP: block(5)}, {STOCK: block(10), AMP: failed}]
    verdict = verdict_of(rounds, STOCK)
    assert verdict is not None
    assert verdict.winner.policy == STOCK
    assert verdict.standings[-1].failure == failed


def test_a_baseline_that_fails_gives_no_verdict() -> None:
    assert verdict_of([{STOCK: Failure(kind="oom", message=""), AMP: block(5)}], STOCK) is None


def test_a_simpler_policy_not_shown_faster_than_the_baseline_does_not_win() -> None:
    noisy = [4.0, 12.0, 4.0, 12.0]
    rounds = rounds_of((STOCK, [10.0] * 4), (AMP_LAST, [5.0] * 4), (AMP, noisy))
    verdict = verdict_of(rounds, STOCK)
    assert verdict is not None
    assert verdict.winner.policy == AMP_LAST


def test_each_fp32_rule_counts_as_a_departure_and_the_users_batch_size_does_not() -> None:
    rules = (Fp32Rule(path="a"), Fp32Rule(path="b"))
    assert departure_count(Policy(batch_size=32)) == 0
    assert departure_count(Policy(autocast="bf16", batch_size=32)) == 1
    assert departure_count(Policy(autocast="bf16", fp32_modules=rules)) == 3


def test_a_verdict_is_settled_when_all_rivals_are_beaten_or_level() -> None:
    assert settled(rounds_of((STOCK, [10.0] * 3), (AMP, [5.0] * 3)), STOCK)
    assert settled(rounds_of((STOCK, [10.0] * 3), (AMP, [10.0] * 3)), STOCK)
    assert not settled(rounds_of((STOCK, [10.0, 8.0, 12.0]), (AMP, [9.0, 11.0, 9.5])), STOCK)


def test_the_interval_of_a_ratio_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(300):
        a = [1.1 * math.exp(rng.gauss(0, 0.02)) for _ in range(5)]
        b = [math.exp(rng.gauss(0, 0.02)) for _ in range(5)]
        ratio = ratio_of(a, b)
        held += ratio.low <= 1.1 <= ratio.high
    assert 0.92 <= held / 300 <= 0.98


def test_standings_are_ordered_by_speed_with_failures_last() -> None:
    rounds: list[Round] = [{STOCK: block(10), AMP: block(5), AMP_LAST: Failure(kind="crash", message="gone")}]
    assert [standing.policy for standing in standings_of(rounds, STOCK)] == [AMP, STOCK, AMP_LAST]


def test_a_ratio_in_words_has_its_interval_or_says_that_it_has_none() -> None:
    assert str(ratio_of([2.0, 2.0], [1.0, 1.0])) == "2.00× [2.00, 2.00]"
    assert str(ratio_of([2.0], [1.0])) == "2.00× (measured once, which claims nothing)"
