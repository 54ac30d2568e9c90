from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from measurements import took
from tables import BF16, BF16_LAST, FP16, Drawn, block, decided, equals, in_turn, row

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import STOCK, Fp32Rule, Policy
from amptune.search.table.effects import CPU, GPU, Machine
from amptune.search.table.objective import NEGLIGIBLE, objective_of
from amptune.search.table.ratio import CONFIRMED, LIKELY
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, departure_count, verdict_of

BOTH = pytest.mark.parametrize("machine", [GPU, CPU], ids=lambda machine: str(machine.device))
OOM = Failure(kind="oom", message="CUDA out of memory")
MEMORY, ENERGY = objective_of("memory"), objective_of("energy")


def of_times(*columns: tuple[Policy, list[float]], per_launch: int = 1, machine: Machine = GPU) -> Verdict:
    return decided(in_turn(dict(columns), per_launch=per_launch), machine)


def of_figures(**ms_and_mib: tuple[float, float]) -> Verdict:
    """The verdict for memory on three rounds of policies with these times and peaks."""
    named = {"stock": STOCK, "bf16": BF16, "fp16": FP16, "bf16_last": BF16_LAST}
    columns = {named[name]: [took(ms, mib)] * 3 for name, (ms, mib) in ms_and_mib.items()}
    return decided(in_turn(columns), GPU, MEMORY)


def codes(verdict: Verdict) -> list[str]:
    return [finding.code for finding in verdict.findings]


def message(verdict: Verdict, code: str) -> str:
    return next(str(finding) for finding in verdict.findings if finding.code == code)


def lost(verdict: Verdict, policy: Policy) -> str:
    contender = verdict.contender_of(policy)
    assert contender is not None
    return contender.lost


# --- who wins ---------------------------------------------------------------------------------------------------------


@BOTH
def test_the_fastest_policy_wins(machine: Machine) -> None:
    verdict = of_times((STOCK, [10.0, 10.1, 9.9]), (BF16, [5.0, 5.1, 4.9]), (FP16, [8.0, 8.1, 7.9]), machine=machine)
    assert verdict.winner.policy == BF16
    assert verdict.leader == verdict.winner
    assert verdict.speedup == verdict.gain == verdict.winner.vs_baseline
    assert verdict.speedup.value == pytest.approx(2.0, rel=0.05)
    assert verdict.confidence == "confirmed"
    assert {"faster", "provisional"} & set(codes(verdict)) == {"faster"}


@BOTH
def test_no_difference_shown_keeps_the_baseline(machine: Machine) -> None:
    verdict = of_times((STOCK, [10.0, 9.0, 11.0]), (BF16, [9.9, 10.5, 9.0]), machine=machine)
    assert verdict.keeps_the_baseline
    assert verdict.winner.policy == STOCK
    assert verdict.leader is not None
    assert verdict.leader.policy == BF16
    assert (verdict.speedup.value, verdict.gain.low, verdict.gain.high) == (1.0, 1.0, 1.0)


def test_of_equals_the_one_with_the_fewest_departures_wins() -> None:
    verdict = of_times((STOCK, [10.0] * 4), (BF16_LAST, [5.0, 5.2, 4.9, 5.1]), (BF16, [5.01, 5.2, 4.91, 5.1]))
    assert verdict.winner.policy == BF16
    assert {"faster", "simplest"} <= set(codes(verdict))
    assert "no difference shown between the 2 fastest; the one with the fewest departures wins" in message(
        verdict, "simplest"
    )


@pytest.mark.parametrize(("behind", "winner"), [(0.2 * NEGLIGIBLE, BF16), (4 * NEGLIGIBLE, BF16_LAST)])
def test_a_simpler_policy_may_be_worse_by_a_share_that_is_none_to_a_user(behind: float, winner: Policy) -> None:
    verdict = of_times((STOCK, [10.0] * 5), (BF16_LAST, [5.0] * 5), (BF16, [5.0 * (1 + behind)] * 5))
    assert verdict.winner.policy == winner
    assert ("simplest" in codes(verdict)) is (winner == BF16)


COMPILED = Policy(autocast="bf16", compile="reduce-overhead", fused_optimizer=True)
RECORDED = Policy(autocast="bf16", cuda_graphs=True)


@pytest.mark.parametrize(("behind", "winner"), [(0.02, COMPILED), (0.05, RECORDED)])
def test_a_compiled_policy_hardly_behind_a_recorded_one_wins(behind: float, winner: Policy) -> None:
    verdict = of_times((STOCK, [10.0] * 5), (RECORDED, [5.0] * 5), (COMPILED, [5.0 * (1 + behind)] * 5))
    assert verdict.winner.policy == winner
    if winner == COMPILED:
        assert "whose graphs PyTorch guards at each step" in lost(verdict, RECORDED)


def test_a_compiled_policy_that_is_not_shown_to_be_better_does_not_win_over_a_recorded_one() -> None:
    rows = in_turn({STOCK: [10.0] * 4, RECORDED: [5.0] * 4})
    rows.append(row(COMPILED, 5.0, moment_s=30.0, spread=3.0))
    assert decided(rows, GPU).winner.policy == RECORDED


def test_of_equals_as_simple_the_better_wins() -> None:
    verdict = of_times((STOCK, [10.0] * 5), (BF16, [5.01] * 5), (FP16, [5.0] * 5))
    assert verdict.winner.policy == FP16


def test_a_simpler_policy_that_is_not_shown_to_be_better_does_not_win() -> None:
    rows = in_turn({STOCK: [10.0] * 4, BF16_LAST: [5.0] * 4})
    rows.append(row(BF16, 5.0, moment_s=30.0, spread=3.0))
    verdict = decided(rows, GPU)
    assert verdict.winner.policy == BF16_LAST
    assert "not shown to be better than the baseline" in lost(verdict, BF16)


def test_a_barred_policy_cannot_win_or_lead() -> None:
    rows = in_turn({STOCK: [10.0] * 3, BF16_LAST: [5.0] * 3, BF16: [6.0] * 3})
    verdict = decided(rows, GPU, bar=lambda policy: "not as good as FP32" if policy == BF16_LAST else None)
    assert verdict.winner.policy == BF16
    assert verdict.leader == verdict.winner
    assert verdict.contenders[0].policy == BF16_LAST, "its figures are still told"
    assert lost(verdict, BF16_LAST) == "not as good as FP32"


def test_the_baseline_stays_if_all_others_are_barred() -> None:
    verdict = decided(in_turn({STOCK: [10.0] * 3, BF16: [5.0] * 3}), GPU, bar=lambda _: "outside the space")
    assert verdict.keeps_the_baseline
    assert verdict.leader is None


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3])
def test_a_policy_that_failed_once_cannot_win_whenever_that_was(at: int) -> None:
    rows = in_turn({STOCK: [10.0] * 3, BF16: [5.0] * 3, FP16: [8.0] * 3})
    rows.insert(at * 3, row(BF16, OOM, launch="search"))
    verdict = decided(rows, GPU)
    assert verdict.winner.policy == FP16
    assert verdict.contenders[-1].policy == BF16
    assert verdict.contenders[-1].failure == OOM
    assert verdict.contenders[-1].gain is None
    assert lost(verdict, BF16) == "failed: oom: CUDA out of memory"


def test_a_baseline_that_was_never_measured_gives_no_verdict() -> None:
    assert verdict_of([row(STOCK, OOM), row(BF16, 5.0)], STOCK, GPU) is None
    assert verdict_of([row(BF16, 5.0)], STOCK, GPU) is None
    assert verdict_of([], STOCK, GPU) is None


def test_a_baseline_that_was_measured_and_failed_later_is_still_compared_with() -> None:
    verdict = decided([*in_turn({STOCK: [10.0] * 3, BF16: [5.0] * 3}), row(STOCK, OOM, moment_s=30.0)], GPU)
    assert verdict.winner.policy == BF16
    assert verdict.baseline.failure is None


# --- how sure ---------------------------------------------------------------------------------------------------------


@BOTH
def test_confidence_is_said_by_the_probability_that_the_winner_is_better(machine: Machine) -> None:
    said = {}
    for percent in range(0, 800, 5):
        times = {STOCK: [10.0] * 2, BF16: [10 / (1 + percent / 100)] * 2}
        verdict = decided(in_turn(times, spread=0.02), machine)
        chance = verdict.contenders[0].chance if percent else 0.5
        word = "confirmed" if chance >= CONFIRMED else "likely" if chance >= LIKELY else "undecided"
        assert verdict.confidence == word
        assert verdict.keeps_the_baseline is (word == "undecided")
        assert ("provisional" in codes(verdict)) is (word == "likely")
        said[word] = percent
    assert list(said) == ["undecided", "likely", "confirmed"]


def test_a_likely_gain_says_what_would_confirm_it() -> None:
    verdict = of_times((STOCK, [10.0, 10.2, 9.9]), (BF16, [9.7, 9.9, 9.7]))
    assert verdict.confidence == "likely"
    finding = next(finding for finding in verdict.findings if finding.code == "provisional")
    assert finding.figures == {"probability": verdict.winner.chance, "confirms": CONFIRMED}
    assert f"{100 * CONFIRMED:.1f} % counts as confirmed; more --budget tells" in str(finding)


def test_a_gain_that_is_sure_in_one_process_alone_says_that_it_takes_two() -> None:
    verdict = of_times((STOCK, [10.0]), (BF16, [5.0]))
    assert (verdict.confidence, verdict.winner.chance > CONFIRMED) == ("likely", True)
    assert "sure that it is better, but in one process alone, where it takes 2 to confirm it; more" in message(
        verdict, "provisional"
    )


@BOTH
def test_a_baseline_that_all_others_are_much_slower_than_is_confirmed(machine: Machine) -> None:
    verdict = of_times((STOCK, [10.0] * 3), (BF16, [20.0] * 3), (FP16, [25.0] * 3), machine=machine)
    assert verdict.keeps_the_baseline
    assert verdict.confidence == "confirmed"
    assert "undecided" not in codes(verdict)
    assert "keep what you have: no policy was shown to be faster; the best rival: bf16, " in message(verdict, "keep")


@BOTH
def test_a_rival_that_may_be_better_leaves_it_undecided(machine: Machine) -> None:
    verdict = of_times((STOCK, [10.0, 10.1]), (BF16, [10.0, 10.05]), machine=machine)
    assert verdict.keeps_the_baseline
    assert verdict.confidence == "undecided"
    assert "a rival may be better; more --budget, or a quieter machine, tells" in message(verdict, "undecided")


def test_the_baseline_alone_confirms_nothing() -> None:
    verdict = decided([row(STOCK, 10.0)], GPU)
    assert verdict.keeps_the_baseline
    assert codes(verdict) == ["budget-too-small"]
    assert "only the baseline was measured" in message(verdict, "budget-too-small")
    assert verdict.confidence == "undecided"


def test_a_rival_that_cannot_win_leaves_nothing_undecided() -> None:
    rows = in_turn({STOCK: [10.0] * 3, BF16: [5.0] * 3, FP16: [20.0] * 3})
    verdict = decided(rows, GPU, bar=lambda policy: "outside the space" if policy == BF16 else None)
    assert verdict.confidence == "confirmed"


@BOTH
def test_a_policy_beside_itself_is_seldom_said_to_be_faster(machine: Machine) -> None:
    """In two launches of two blocks; of 200 tables, less than the one in twenty that an interval of 95 % allows."""
    named = equals(2)[1]
    likely = differing = confirmed = 0
    for seed in range(200):
        table = Drawn(machine, {STOCK: 10.0, named: 10.0}, 0.08, seed=seed, wide=1.5)
        for launch in range(2):
            table.rounds(2, launch=str(launch), start_s=60.0 * launch)
        verdict = decided(table.rows, machine)
        likely += verdict.confidence == "likely" and not verdict.keeps_the_baseline
        confirmed += verdict.confidence == "confirmed" and not verdict.keeps_the_baseline
        ratio = verdict.scores.between(named, STOCK)
        differing += ratio is not None and not ratio.low <= 1 <= ratio.high
    assert confirmed <= 2
    assert likely <= 20
    assert differing <= 14


# --- noise ------------------------------------------------------------------------------------------------------------


@BOTH
def test_drift_that_hits_all_policies_alike_claims_nothing(machine: Machine) -> None:
    drift = [10.0, 9.5, 9.0, 8.6, 8.3]
    assert of_times((STOCK, drift), (BF16, drift), machine=machine).keeps_the_baseline


@BOTH
def test_a_gain_that_one_launch_of_three_does_not_show_claims_nothing(machine: Machine) -> None:
    """Nine rounds seem to show it; but the launches differ, and they are what counts."""
    times = [9.0] * 3 + [9.1] * 3 + [10.1] * 3
    assert of_times((STOCK, [10.0] * 9), (BF16, times), per_launch=3, machine=machine).keeps_the_baseline


@BOTH
def test_two_rounds_under_heavy_interference_confirm_nothing(machine: Machine) -> None:
    """Seen on a CPU that another process used: the baseline was hit in both rounds, its rival in one."""
    verdict = of_times((STOCK, [86.0, 88.0]), (BF16, [0.33, 54.0]), per_launch=2, machine=machine)
    assert verdict.confidence != "confirmed"
    assert verdict.contenders[0].gain is not None
    assert verdict.contenders[0].gain.low < 1


@BOTH
def test_nothing_is_confirmed_beside_a_baseline_that_was_only_measured_disturbed(machine: Machine) -> None:
    hit = [block(ms, contaminated_by=("foreign-process",)) for ms in (11.0, 11.2, 10.9)]
    assert decided(in_turn({STOCK: hit, BF16: [10.0, 10.02, 9.99]}), machine).keeps_the_baseline
    hit = [block(ms, contaminated_by=("foreign-process",)) for ms in (110.0, 112.0, 109.0)]
    verdict = decided(in_turn({STOCK: hit, BF16: [10.0, 10.02, 9.99]}), machine)
    assert (verdict.winner.policy, verdict.confidence) == (BF16, "likely")


def test_a_simpler_policy_is_not_worth_a_loss_of_confidence() -> None:
    rows = in_turn({STOCK: [10.0, 10.01, 9.99, 10.0] * 2, BF16_LAST: [9.5, 9.51, 9.49, 9.5] * 2}, per_launch=2)
    verdict = decided([*rows, row(BF16, 9.5, moment_s=33.0, spread=0.012)], GPU)
    assert (verdict.winner.policy, verdict.confidence) == (BF16_LAST, "confirmed")


def test_a_policy_that_may_be_fast_enough_stays_open_and_one_that_may_be_too_slow_is_not_confirmed() -> None:
    times = [10.0 * factor for factor in (1.0, 1.05, 0.96)]
    columns = {STOCK: [block(ms, 0.03, mib=1000.0) for ms in times]}
    for slower, expected in ((1.0, (BF16, "likely")), (1.03, (STOCK, "undecided")), (2.0, (STOCK, "undecided"))):
        columns[BF16] = [block(slower * ms, 0.03, mib=500.0) for ms in times]
        verdict = decided(in_turn(columns), GPU, objective_of("memory"))
        assert (verdict.winner.policy, verdict.confidence) == expected
        rival = verdict.contender_of(BF16)
        assert rival is not None
        assert rival.may_win is (slower < 2)


def test_figures_are_those_of_the_newest_run_for_runs_differ() -> None:
    rows = [
        *in_turn({STOCK: [30.0] * 3, BF16: [27.0] * 3}, run="former"),
        *in_turn({STOCK: [10.0] * 3, FP16: [9.8] * 3}, run="now"),
    ]
    of = {one.policy: one.step_ms for one in decided(rows, GPU).contenders}
    assert [of[STOCK], of[FP16]] == pytest.approx([10.0, 9.8])
    assert of[BF16] == pytest.approx(9.0, rel=0.02)


def test_what_shares_no_run_with_the_baseline_is_not_compared() -> None:
    verdict = decided([row(STOCK, 10.0, run="a"), row(BF16, 5.0, run="b"), row(FP16, 6.0, run="b")], GPU)
    assert (verdict.leader, verdict.keeps_the_baseline) == (None, True)


def test_throttled_blocks_hide_no_gain() -> None:
    """A GPU that was too hot in two of nine blocks."""
    hot = [block(13.0, contaminated_by=("hw-thermal",)), block(11.5, contaminated_by=("hw-thermal",))]
    rows = in_turn({STOCK: [block(10.0, 0.002)] * 9, BF16: [*[block(9.0, 0.002)] * 7, *hot]}, per_launch=3)
    verdict = decided(rows, GPU)
    assert verdict.winner.policy == BF16
    assert verdict.speedup.value == pytest.approx(10 / 9, rel=0.03)


@pytest.mark.parametrize(("times", "noisy"), [([9.0, 11.0, 8.5], True), ([9.99, 10.01, 9.98], False)])
def test_blocks_that_differ_by_much_are_told(times: list[float], *, noisy: bool) -> None:
    verdict = of_times((STOCK, [10.0, 12.0, 8.0] if noisy else [10.0] * 3), (BF16, times), per_launch=3)
    assert ("noisy" in codes(verdict)) is noisy
    if noisy:
        assert "blocks of one policy differ by " in message(verdict, "noisy")
        assert "the host is busy, or too slow for its device" in message(verdict, "noisy")


# --- objectives -------------------------------------------------------------------------------------------------------


def test_a_policy_too_slow_for_the_memory_objective_cannot_win() -> None:
    verdict = of_figures(stock=(10.0, 1000), bf16=(9.5, 600), fp16=(12.0, 400))
    assert verdict.winner.policy == BF16
    assert verdict.gain.value == pytest.approx(1000 / 600, rel=0.01)
    assert verdict.speedup.value == pytest.approx(10 / 9.5, rel=0.01)
    slow = verdict.contender_of(FP16)
    assert slow is not None
    assert slow.too_slow
    assert "too slow: 0.83× [" in slow.lost
    assert "the speed of the baseline" in slow.lost
    assert "uses 0.60 " in message(verdict, "less-memory")


def test_the_least_speed_is_the_users() -> None:
    rows = in_turn({STOCK: [took(10.0, 1000)] * 3, FP16: [took(12.0, 400)] * 3})
    assert decided(rows, GPU, MEMORY).keeps_the_baseline
    assert decided(rows, GPU, objective_of("memory", 0.8)).winner.policy == FP16


def test_a_speed_that_may_be_too_low_is_told() -> None:
    verdict = of_figures(stock=(10.0, 1000), bf16=(10.05, 600))
    assert verdict.winner.policy == BF16
    assert "is not shown to be the 1 times that it has to be" in message(verdict, "speed-not-shown")
    assert "speed-not-shown" not in codes(of_figures(stock=(10.0, 1000), bf16=(9.0, 600)))


def test_a_little_memory_is_worth_no_change() -> None:
    assert of_figures(stock=(10.0, 1000), bf16=(10.0, 998)).keeps_the_baseline


def test_of_policies_that_use_the_same_memory_the_fastest_wins() -> None:
    """2 MiB less are worth no speed: on an H200 fp16 had taken 46 ms and 3,901 MiB, bf16 37 ms and 3,903."""
    verdict = of_figures(stock=(48.8, 6499), fp16=(46.3, 3901), bf16=(37.1, 3903), bf16_last=(35.9, 3980))
    assert verdict.winner.policy == BF16


def test_of_energy_the_least_per_sample_wins_and_who_has_none_cannot() -> None:
    def blocks(ms: float, joules: float | None) -> list[Measurement]:
        return [took(ms, energy_j_per_sample=joules)] * 3

    columns = {STOCK: blocks(10, 1.0), BF16: blocks(11, 0.5), FP16: blocks(5, None)}
    verdict = decided(in_turn(columns), GPU, ENERGY)
    assert verdict.winner.policy == BF16
    assert verdict.winner.energy_j_per_sample == 0.5
    assert verdict.gain.value == pytest.approx(2.0, rel=0.05)
    assert verdict.speedup.value == pytest.approx(10 / 11, rel=0.02)
    assert lost(verdict, FP16) == "has no figure of energy"
    assert codes(verdict)[0] == "less-energy"


# --- what is told of each ---------------------------------------------------------------------------------------------


def test_every_contender_that_lost_says_why_and_the_winner_does_not() -> None:
    columns = {STOCK: [10.0] * 3, BF16: [5.0] * 3, FP16: [6.0] * 3, BF16_LAST: [12.0] * 3}
    equal, failing, barred = (Policy(autocast="bf16", cudnn_benchmark=True), Policy(compile="default"), equals(2)[1])
    rows = [*in_turn({**columns, equal: [5.0] * 3, barred: [4.0] * 3}), row(failing, OOM, moment_s=50.0)]
    verdict = decided(rows, GPU, bar=lambda policy: "not as good as FP32" if policy == barred else None)
    assert verdict.winner.policy == BF16
    assert verdict.winner.lost == lost(verdict, BF16) == ""
    assert lost(verdict, STOCK) == "bf16 is better"
    assert lost(verdict, FP16).startswith("behind bf16 by ")
    assert float(lost(verdict, FP16).removeprefix("behind bf16 by ").strip(" %")) == pytest.approx(20, abs=1)
    assert lost(verdict, BF16_LAST).startswith("not shown to be better than the baseline: 0.8")
    assert lost(verdict, BF16_LAST).endswith(" % sure")
    assert lost(verdict, equal) == "no better than bf16, and not simpler"
    assert lost(verdict, failing).startswith("failed: oom")
    assert lost(verdict, barred) == "not as good as FP32"


@BOTH
def test_where_the_baseline_stays_all_others_say_why(machine: Machine) -> None:
    verdict = of_times((STOCK, [10.0] * 2), (BF16, [10.0] * 2), (FP16, [11.0] * 2), machine=machine)
    assert verdict.keeps_the_baseline
    assert lost(verdict, STOCK) == ""
    assert all(contender.lost for contender in verdict.contenders if contender.policy != STOCK)


def test_contenders_stand_best_first_then_what_is_too_slow_then_failures() -> None:
    failing = Policy(compile="default")
    columns = {STOCK: [took(10, 1000)] * 2, FP16: [took(20, 400)] * 2, BF16: [took(9, 600)] * 2}
    rows = [row(failing, OOM), *in_turn(columns)]
    verdict = decided(rows, GPU, MEMORY)
    assert [contender.policy for contender in verdict.contenders] == [BF16, STOCK, FP16, failing]


def test_a_contender_has_its_figures() -> None:
    rows = in_turn({STOCK: [took(10, 900), took(11, 1000), took(9, 950)], BF16: [took(5, energy_j_per_sample=0.5)] * 3})
    verdict = decided(rows, GPU)
    own, rival = verdict.baseline, verdict.winner
    assert own.step_ms == pytest.approx(10.0)
    assert own.samples_per_s == pytest.approx(3200.0)
    assert own.step_ms_ci95 is not None
    assert own.step_ms_ci95[0] < 10.0 < own.step_ms_ci95[1]
    assert own.peak_memory_mib == 1000
    assert own.energy_j_per_sample is None
    assert (own.rows, rival.rows, rival.energy_j_per_sample) == (3, 3, 0.5)
    assert rival.speedup == rival.merit == pytest.approx(2.0, rel=0.05)
    assert verdict.contender_of(FP16) is None


def test_a_failed_contender_has_no_merit() -> None:
    verdict = decided([row(STOCK, 10.0), row(BF16, OOM)], GPU)
    failed = verdict.contender_of(BF16)
    assert failed is not None
    assert (failed.speedup, failed.merit, failed.chance, failed.step_ms) == (0.0, 0.0, 0.0, None)


def test_each_fp32_rule_counts_as_a_departure_and_the_users_batch_size_does_not() -> None:
    rules = (Fp32Rule(path="a"), Fp32Rule(path="b"))
    assert departure_count(Policy(batch_size=32, accumulate=2)) == 0
    assert departure_count(Policy(autocast="bf16", batch_size=32)) == 1
    assert departure_count(Policy(autocast="bf16", fp32_modules=rules)) == 3


# --- what training pays -----------------------------------------------------------------------------------------------


def timed(policy: Policy, step_ms: Sequence[float], **more: Any) -> Row:
    launch, moment_s = more.pop("launch", "0"), more.pop("moment_s", 0.0)
    outcome = replace(took(), step_ms=tuple(step_ms), **more)
    return Row(policy=policy, outcome=outcome, run="run", launch=launch, moment_s=moment_s)


def test_a_policy_that_still_compiles_cannot_win_however_fast_its_steps_were() -> None:
    rows = [row(STOCK, 40.0), timed(BF16, [18.0] * 9, settled=False), row(FP16, 30.0)]
    verdict = decided(rows, GPU)
    assert verdict.winner.policy == FP16
    lost = verdict.contender_of(BF16)
    assert lost is not None
    assert "compiled or recorded anew" in lost.lost


def test_a_policy_that_settles_in_a_later_block_can_win() -> None:
    rows = [row(STOCK, 40.0), timed(BF16, [18.0] * 9, settled=False), row(BF16, 20.0, launch="1")]
    assert decided(rows, GPU).winner.policy == BF16


def test_once_the_loop_contradicts_a_trial_only_what_the_loop_has_timed_can_win() -> None:
    """As a model that stops at an exit chosen by data: 37 ms on batches that come again, 263 on new ones."""
    compiled = BF16.compiled("reduce-overhead")
    trials = [row(STOCK, 58.0), row(compiled, 37.0), row(BF16, 39.0)]
    assert decided(trials, GPU).winner.policy == compiled
    rows = [*trials, timed(compiled, [263.0] * 9, settled=False, in_loop=True)]
    verdict = decided(rows, GPU)
    assert verdict.keeps_the_baseline
    assert "compiled or recorded anew" in lost(verdict, compiled)
    assert "has not timed this one" in lost(verdict, BF16)
    assert "by its trial alone" in message(verdict, "keep")
    leader = verdict.leader
    assert leader is not None
    assert leader.policy == BF16, "it is the next to get a turn in the loop"
    assert decided([*rows, *loops({STOCK: [40.0, 40.0], BF16: [30.0, 30.0]})], GPU).winner.policy == BF16
    assert decided([*rows, *loops({STOCK: [26.0, 26.0], BF16: [38.0, 38.0]})], GPU).keeps_the_baseline


def test_where_the_loop_cannot_tell_a_second_process_speaks_of_a_policy_without_graphs() -> None:
    compiled = BF16.compiled("default")
    rows = [
        *in_turn({STOCK: [10.0], compiled: [5.0], FP16: [6.0]}),
        *loops({STOCK: [10.0], compiled: [90.0]}, wait_share=0.5, settled=False),
    ]
    assert decided(rows, GPU).keeps_the_baseline
    assert decided([*rows, *in_turn({STOCK: [10.0] * 3, FP16: [6.0] * 3}, start_s=200.0)], GPU).winner.policy == FP16
    again = in_turn({STOCK: [10.0] * 3, BF16.compiled("reduce-overhead"): [5.0] * 3}, start_s=200.0)
    assert decided([*rows, *again], GPU).keeps_the_baseline, "graphs may keep coming on new batches"


def test_a_trials_memory_is_not_contradicted_by_the_loops_speed() -> None:
    def used(ms: float, mib: float, **more: Any) -> Measurement:
        return replace(took(ms, mib), **more)

    trials = [row(STOCK, used(10.0, 1000.0)), row(BF16, used(7.0, 900.0)), row(FP16, used(6.0, 400.0))]
    looped = [row(STOCK, used(10.0, 1000.0, in_loop=True)), row(BF16, used(17.0, 900.0, in_loop=True))]
    assert decided([*trials, *looped], GPU).keeps_the_baseline
    assert decided([*trials, *looped], GPU, MEMORY).winner.policy == FP16


def test_of_level_and_equally_simple_policies_the_one_that_the_loop_has_timed_wins() -> None:
    rows = [*in_turn({STOCK: [10.0] * 4, BF16: [5.0] * 4, FP16: [4.998] * 4}), *loops({STOCK: [10.0] * 2})]
    assert decided(rows, GPU).winner.policy == FP16
    assert decided([*rows, *loops({BF16: [5.0] * 2})], GPU).winner.policy == BF16


def test_a_policy_that_is_slow_now_and_then_and_may_be_slower_does_not_replace_the_baseline() -> None:
    """As a model whose dropped layers make it record anew: 18.6 ms as a rule, hundreds in the mean."""
    steps = [18.6] * 19 + [400.0]
    rows = [timed(STOCK, [40.6, 40.7, 40.5, 40.6] * 5), timed(BF16, steps), timed(BF16, steps, launch="1")]
    assert decided(rows, GPU).keeps_the_baseline


def test_one_process_confirms_nothing() -> None:
    one = decided(in_turn({STOCK: [10.0] * 8, BF16: [2.0] * 8}, per_launch=8), GPU)
    assert (one.winner.policy, one.confidence) == (BF16, "likely")
    assert decided(in_turn({STOCK: [10.0] * 8, BF16: [2.0] * 8}, per_launch=4), GPU).confidence == "confirmed"


def loops(columns: Mapping[Policy, Sequence[float]], **more: Any) -> list[Row]:
    return in_turn(
        {policy: [replace(block(ms), in_loop=True, **more) for ms in times] for policy, times in columns.items()},
        start_s=100.0,
    )


def test_the_users_loop_has_the_last_word() -> None:
    """A policy that is faster on batches that lie on the device, and slower in the loop, does not win."""
    trials = [row(STOCK, 10.0), row(BF16, 5.0), row(FP16, 6.0)]
    assert decided(trials, GPU).winner.policy == BF16
    verdict = decided([*trials, *loops({STOCK: [10.0] * 3, BF16: [8.0] * 3, FP16: [6.0] * 3})], GPU)
    assert verdict.winner.policy == FP16
    assert verdict.winner.step_ms == pytest.approx(6.0)
    assert verdict.speedup.value == pytest.approx(10 / 6, rel=0.02)


def test_what_the_loop_takes_longer_by_is_told_by_the_policies_that_it_timed() -> None:
    """A loop copies 154 MB a step: 2.8 ms, of 195 as of 28; a policy that a trial alone had timed seemed 7 % faster."""
    times = {STOCK: 194.9, BF16: 28.0, FP16: 28.0}
    trials = [row(policy, ms, moment_s=2.0 * i, spread=0.001) for i, (policy, ms) in enumerate(times.items())]
    turns = loops({policy: [times[policy] + 2.8] for policy in (STOCK, BF16)})
    (unseen,) = [one for one in decided([*trials, *turns], GPU).contenders if one.policy == FP16]
    assert unseen.vs_baseline is not None
    assert unseen.vs_baseline.value == pytest.approx(197.7 / 30.8, rel=0.02)
    assert unseen.vs_baseline.low < 197.7 / 30.8 < unseen.vs_baseline.high
    assert unseen.step_ms == pytest.approx(30.8, rel=0.02), "what training pays"


def test_what_the_loop_did_not_time_is_doubted() -> None:
    trials = [row(STOCK, 10.0), row(BF16, 9.7)]
    few, more = decided(trials, GPU), decided([*trials, *loops({STOCK: [10.0] * 3})], GPU)
    assert few.contenders[0].gain is not None
    assert more.contenders[0].gain is not None
    assert more.contenders[0].gain.half_width > 1.5 * few.contenders[0].gain.half_width


def test_if_the_loop_waits_for_its_data_steps_decide() -> None:
    trials = [row(STOCK, 10.0), row(BF16, 5.0)]
    verdict = decided([*trials, *loops({STOCK: [10.0] * 3, BF16: [10.0] * 3}, wait_share=0.4)], GPU)
    assert verdict.waits_for_data
    assert verdict.winner.policy == BF16
    assert verdict.winner.step_ms == pytest.approx(5.0)
