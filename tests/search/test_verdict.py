from __future__ import annotations

from collections.abc import Sequence

import pytest
from measurements import took

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe
from amptune.search.table.ratio import Round
from amptune.search.table.verdict import Verdict, contenders_of, departure_count, settled, verdict_of

AMP = amp_recipe("bf16")
AMP_LAST = amp_recipe("bf16", memory_format="channels_last")


def block(step_ms: float) -> Measurement:
    return took(step_ms, 100.0)


def rounds_of(*columns: tuple[Policy, Sequence[float]], rounds_per_launch: int = 1) -> list[Round]:
    return [
        Round(launch=i // rounds_per_launch, outcomes={policy: block(times[i]) for policy, times in columns})
        for i in range(len(columns[0][1]))
    ]


def decided(*columns: tuple[Policy, Sequence[float]], rounds_per_launch: int = 1) -> Verdict:
    verdict = verdict_of(rounds_of(*columns, rounds_per_launch=rounds_per_launch), STOCK)
    assert verdict is not None
    return verdict


def test_the_fastest_policy_wins_when_every_launch_shows_it() -> None:
    verdict = decided((STOCK, [10.0, 10.1, 9.9]), (AMP, [5.0, 5.1, 4.9]))
    assert verdict.winner.policy == AMP
    assert verdict.speedup.value == pytest.approx(2.0, rel=0.02)
    assert verdict.speedup.low > 1.9
    assert [finding.code for finding in verdict.findings] == ["faster"]


def test_no_difference_shown_keeps_the_baseline() -> None:
    verdict = decided((STOCK, [10.0, 9.0, 11.0]), (AMP, [9.9, 10.5, 9.0]))
    assert verdict.keeps_the_baseline
    assert verdict.findings[0].code == "keep"
    assert "keep what you have: no policy was shown to be faster" in str(verdict.findings[0])


def test_among_equals_the_fewest_departures_win() -> None:
    verdict = decided((STOCK, [10.0] * 4), (AMP_LAST, [5.0, 5.2, 4.9, 5.1]), (AMP, [5.02, 5.19, 4.92, 5.1]))
    assert verdict.winner.policy == AMP
    assert {finding.code for finding in verdict.findings} == {"faster", "simplest"}


def test_of_two_better_policies_the_faster_wins_while_it_is_unclear_whether_they_differ() -> None:
    verdict = decided((STOCK, [10.0] * 3), (AMP_LAST, [5.0, 5.4, 4.8]), (AMP, [5.2, 5.3, 5.3]))
    assert verdict.winner.policy == AMP_LAST


def test_drift_that_hits_all_policies_alike_claims_nothing() -> None:
    drift = [1.0, 0.95, 0.9, 0.86, 0.83]
    assert decided((STOCK, [10 * d for d in drift]), (AMP, [10 * d for d in drift])).keeps_the_baseline


def test_one_round_alone_claims_nothing() -> None:
    assert decided((STOCK, [10.0]), (AMP, [5.0])).keeps_the_baseline


def test_two_rounds_under_heavy_interference_claim_nothing() -> None:
    """Seen on a CPU that another process used: the baseline was hit in both rounds, its rival in one."""
    assert decided((STOCK, [86.0, 88.0]), (AMP, [0.33, 54.0]), rounds_per_launch=2).keeps_the_baseline


@pytest.mark.parametrize(("times", "noisy"), [([9.0, 11.0, 8.5], True), ([9.99, 10.01, 9.98], False)])
def test_where_nothing_is_shown_it_is_said_how_far_rounds_differ(times: list[float], *, noisy: bool) -> None:
    verdict = decided((STOCK, [10.0, 10.0, 10.0]), (AMP, times))
    assert verdict.keeps_the_baseline
    assert ("noisy" in [finding.code for finding in verdict.findings]) is noisy


def test_a_gain_that_one_launch_of_three_does_not_show_claims_nothing() -> None:
    """Nine rounds seem to show it; but the launches differ, and they are what counts."""
    times = [9.0] * 3 + [9.1] * 3 + [10.1] * 3
    assert decided((STOCK, [10.0] * 9), (AMP, times), rounds_per_launch=3).keeps_the_baseline


def test_fewer_launches_than_wanted_are_said_so() -> None:
    verdict = decided((STOCK, [10.0, 10.1, 9.9]), (AMP, [5.0, 5.1, 4.9]), rounds_per_launch=3)
    assert verdict.winner.policy == AMP
    assert [finding.code for finding in verdict.findings] == ["faster", "few-launches"]
    assert "the budget held one process launch of each contender, of 3 wanted" in str(verdict.findings[1])


def test_a_policy_that_failed_once_stands_there_with_its_failure_and_cannot_win() -> None:
    failed = Failure(kind="oom", message="CUDA out of memory")
    rounds = [
        Round(launch=0, outcomes={STOCK: block(10), AMP: block(5)}),
        Round(launch=1, outcomes={STOCK: block(10), AMP: failed}),
    ]
    verdict = verdict_of(rounds, STOCK)
    assert verdict is not None
    assert verdict.winner.policy == STOCK
    assert verdict.contenders[-1].failure == failed


def test_a_baseline_that_fails_gives_no_verdict() -> None:
    failed = Failure(kind="oom", message="")
    assert verdict_of([Round(launch=0, outcomes={STOCK: failed, AMP: block(5)})], STOCK) is None


def test_a_simpler_policy_not_shown_faster_than_the_baseline_does_not_win() -> None:
    noisy = [4.0, 12.0, 4.0, 12.0]
    verdict = decided((STOCK, [10.0] * 4), (AMP_LAST, [5.0] * 4), (AMP, noisy))
    assert verdict.winner.policy == AMP_LAST


def test_only_eligible_policies_win() -> None:
    rounds = rounds_of((STOCK, [10.0] * 3), (AMP_LAST, [5.0] * 3), (AMP, [6.0] * 3))
    verdict = verdict_of(rounds, STOCK, lambda policy: policy == AMP)
    assert verdict is not None
    assert verdict.winner.policy == AMP


def test_each_fp32_rule_counts_as_a_departure_and_the_users_batch_size_does_not() -> None:
    rules = (Fp32Rule(path="a"), Fp32Rule(path="b"))
    assert departure_count(Policy(batch_size=32)) == 0
    assert departure_count(Policy(autocast="bf16", batch_size=32)) == 1
    assert departure_count(Policy(autocast="bf16", fp32_modules=rules)) == 3


def test_a_comparison_is_settled_when_all_ratios_were_narrow_before_the_last_launch_too() -> None:
    assert settled(rounds_of((STOCK, [10.0] * 5), (AMP, [5.0] * 5)), STOCK)
    assert not settled(rounds_of((STOCK, [10.0] * 5), (AMP, [9.0, 11.0, 9.5, 9.0, 9.2])), STOCK)


def test_few_launches_settle_nothing_however_alike_they_look() -> None:
    assert not settled(rounds_of((STOCK, [10.0] * 4), (AMP, [5.0] * 4)), STOCK)


def test_a_rival_that_was_left_out_does_not_keep_a_comparison_going() -> None:
    rounds = rounds_of((STOCK, [10.0] * 5), (AMP, [5.0] * 5))
    first = Round(launch=0, outcomes={**rounds[0].outcomes, AMP_LAST: block(90)})
    assert settled([first, *rounds[1:]], STOCK)


def test_a_rival_that_was_left_out_cannot_win_with_what_it_had() -> None:
    rounds = rounds_of((STOCK, [10.0] * 4), (AMP_LAST, [5.0] * 4), (AMP, [4.9] * 4))
    last = Round(launch=3, outcomes={p: o for p, o in rounds[3].outcomes.items() if p != AMP})
    verdict = verdict_of([*rounds[:3], last], STOCK)
    assert verdict is not None
    assert verdict.winner.policy == AMP_LAST


def test_doubt_asks_for_more_than_an_interval_that_just_excludes_1() -> None:
    rounds = rounds_of((STOCK, [10.0, 10.0, 10.0]), (AMP, [9.8, 9.7, 9.6]))
    plain, doubted = verdict_of(rounds, STOCK), verdict_of(rounds, STOCK, doubt=1.5)
    assert plain is not None
    assert doubted is not None
    assert not plain.keeps_the_baseline
    assert doubted.keeps_the_baseline


def test_contenders_are_ordered_by_speed_with_failures_last() -> None:
    rounds = [
        Round(launch=0, outcomes={STOCK: block(10), AMP: block(5), AMP_LAST: Failure(kind="crash", message="gone")})
    ]
    assert [contender.policy for contender in contenders_of(rounds, STOCK)] == [AMP, STOCK, AMP_LAST]


def test_a_contender_has_its_time_and_the_spread_of_its_launches() -> None:
    (contender,) = contenders_of(rounds_of((STOCK, [9.0, 10.0, 11.0])), STOCK)
    assert contender.step_ms == pytest.approx(10.0, rel=0.01)
    assert contender.step_ms_ci95 is not None
    assert contender.step_ms_ci95[0] < 9.0 < 11.0 < contender.step_ms_ci95[1]
    assert contender.samples_per_s == pytest.approx(3200, rel=0.01)
