from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import took
from tables import BF16, BF16_LAST, FP16, Drawn, block, decided, equals, in_turn, row

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import STOCK, Fp32Rule, Policy
from amptune.search.table.effects import CPU, GPU, Machine
from amptune.search.table.objective import NEGLIGIBLE, Objective, objective_of
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, departure_count, verdict_of

BOTH = pytest.mark.parametrize("machine", [GPU, CPU], ids=lambda machine: str(machine.device))
OOM = Failure(kind="oom", message="CUDA out of memory")
MEMORY, ENERGY = objective_of("memory"), objective_of("energy")


def of_figures(
    columns: Mapping[Policy, tuple[float, float]], objective: Objective = MEMORY, rounds: int = 3
) -> Verdict:
    """The verdict for memory on rounds of policies with these times and peaks."""
    return decided(in_turn({one: [took(*of)] * rounds for one, of in columns.items()}), GPU, objective)


def codes(verdict: Verdict) -> list[str]:
    return [finding.code for finding in verdict.findings]


def message(verdict: Verdict, code: str) -> str:
    return next(str(finding) for finding in verdict.findings if finding.code == code)


def lost(verdict: Verdict, policy: Policy) -> str:
    contender = verdict.contender_of(policy)
    assert contender is not None
    return contender.lost


# --- who wins ---------------------------------------------------------------------------------------------------------


COMPILED = Policy(autocast="bf16", compile="reduce-overhead")
RECORDED = Policy(autocast="bf16", cuda_graphs=True)


@pytest.mark.parametrize(
    ("columns", "winner"),
    [
        # A simpler policy may be worse by a share that is none to a user; of equals as simple the better wins.
        ({BF16_LAST: 5.0, BF16: 5.0 * (1 + 0.2 * NEGLIGIBLE)}, BF16),
        ({BF16: 5.01, FP16: 5.0}, FP16),
        # Of level and equally simple policies the compiled one wins: PyTorch guards its graphs at each step.
        ({RECORDED: 5.0, COMPILED: 5.01}, COMPILED),
        ({RECORDED: 5.0, COMPILED: 5.0 * 1.02}, RECORDED),
    ],
)
def test_of_policies_that_are_level_the_simplest_wins(columns: dict[Policy, float], winner: Policy) -> None:
    verdict = decided(in_turn({STOCK: [10.0] * 5, **{policy: [ms] * 5 for policy, ms in columns.items()}}), GPU)
    assert verdict.winner.policy == winner


def test_a_baseline_that_was_never_measured_gives_no_verdict_and_one_that_failed_later_is_still_compared_with() -> None:
    assert verdict_of([row(STOCK, OOM), row(BF16, 5.0)], STOCK, GPU) is None
    assert verdict_of([], STOCK, GPU) is None
    verdict = decided([*in_turn({STOCK: [10.0] * 3, BF16: [5.0] * 3}), row(STOCK, OOM, moment_s=30.0)], GPU)
    assert (verdict.winner.policy, verdict.baseline.failure) == (BF16, None)


# --- how sure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stock", "bf16", "per_launch", "code", "words", "confidence"),
    [
        (
            [10.0, 10.2, 9.9],
            [9.6, 9.8, 9.6],
            1,
            "provisional",
            " % sure: 3 measurements in 3 processes; more",
            "likely",
        ),
        (
            [10.0] * 8,
            [2.0] * 8,
            8,
            "provisional",
            "8 measurements in 1 process, and it takes 2 to confirm it",
            "likely",
        ),
        (
            [10.0] * 3,
            [20.0] * 3,
            1,
            "keep",
            "keep what you have: no policy was shown to be faster",
            "confirmed",
        ),
        # Drift that hits all policies alike, and a gain that one launch of three does not show, claim nothing.
        (
            *([10.0, 9.5, 9.0, 8.6, 8.3],) * 2,
            1,
            "undecided",
            "too few measurements to tell if the only other policy that runs is",
            "undecided",
        ),
        ([10.0] * 9, [9.0] * 3 + [9.1] * 3 + [10.1] * 3, 3, "undecided", "more --budget", "undecided"),
    ],
)
def test_a_verdict_says_how_sure_it_is_and_what_would_confirm_it(
    stock: list[float], bf16: list[float], per_launch: int, code: str, words: str, confidence: str
) -> None:
    verdict = decided(in_turn({STOCK: stock, BF16: bf16}, per_launch=per_launch), GPU)
    kept = code in ("keep", "undecided")
    assert verdict.keeps_the_baseline is kept
    assert verdict.confidence == confidence
    assert words in message(verdict, code)
    assert ("undecided" in codes(verdict)) is (confidence == "undecided")
    if kept:
        assert (verdict.speedup.value, verdict.gain.low, verdict.gain.high) == (1.0, 1.0, 1.0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gain=st.floats(0.8, 4.0),
    launches=st.integers(1, 2),
    blocks=st.integers(1, 3),
    spread=st.floats(0.001, 0.5),
    machine=st.sampled_from([GPU, CPU]),
)
def test_a_policy_is_written_only_if_the_baseline_does_not_lie_within_its_interval(
    seed: int, gain: float, launches: int, blocks: int, spread: float, machine: Machine
) -> None:
    table = Drawn(machine, {STOCK: 10.0, BF16: 10.0 / gain, FP16: 12.0}, spread, seed=seed, wide=2.0)
    for launch in range(launches):
        table.rounds(blocks, launch=str(launch), start_s=60.0 * launch)
    verdict = decided(table.rows, machine)
    assert verdict.keeps_the_baseline or verdict.gain.low >= 1
    assert (verdict.confidence == "confirmed") <= (launches > 1 or verdict.keeps_the_baseline)
    if not verdict.keeps_the_baseline and launches == 1:
        assert (verdict.gain.low, verdict.confidence) == (1.0, "likely"), "nobody saw what another process does"


@pytest.mark.parametrize(
    ("gain", "launches", "blocks", "machine", "confidence"),
    [
        (1.3, 1, 3, GPU, "likely"),
        # On a CPU processes differ by 1.6 times at times: one process shows only a gain beyond that.
        (1.6, 1, 3, CPU, "undecided"),
        (1.8, 1, 1, CPU, "undecided"),
        (1.9, 1, 2, CPU, "likely"),
        (3.0, 1, 1, CPU, "likely"),
        (1.9, 2, 1, CPU, "confirmed"),
    ],
)
def test_a_gain_is_claimed_if_it_is_beyond_what_processes_differ_by(
    gain: float, launches: int, blocks: int, machine: Machine, confidence: str
) -> None:
    count = launches * blocks
    columns = {STOCK: [10.0 * gain] * count, BF16: [10.0] * count}
    verdict = decided(in_turn(columns, per_launch=blocks, spread=0.01), machine)
    assert (verdict.keeps_the_baseline, verdict.confidence) == (confidence == "undecided", confidence)
    assert verdict.leader is not None
    assert verdict.leader.policy == BF16
    if verdict.keeps_the_baseline:
        assert "bf16" in verdict.grounds


def test_a_gain_beside_a_busy_program_is_claimed_and_not_confirmed() -> None:
    waiting = {policy: [block(ms, 0.1, host_delay=0.4, contaminated_by=("host-load",))] * 4 for policy, ms in BUSY}
    verdict = decided(in_turn(waiting), CPU)
    assert (verdict.winner.policy, verdict.confidence) == (BF16_LAST, "likely")


BUSY = [(STOCK, 72.0), (BF16_LAST, 40.0)]


def test_a_policy_that_is_very_slow_now_and_then_does_not_win() -> None:
    steps = tuple(3.0 if n % 10 else 50.0 for n in range(30))
    assert decided([row(STOCK, 10.0), timed(BF16, steps)], GPU).keeps_the_baseline


def test_a_trial_that_ended_early_neither_wins_nor_leads() -> None:
    early = [row(BF16, block(ms, abandoned=True), moment_s=ms) for ms in (2.0, 30.0)]
    verdict = decided([row(STOCK, 10.0), *early], GPU)
    assert verdict.leader is None
    assert verdict.keeps_the_baseline
    assert (verdict.is_open, verdict.confidence) == (False, "confirmed")
    assert decided([row(STOCK, 10.0), row(FP16, 5.0), *early], GPU).winner.policy == FP16


def test_without_a_comparison_there_is_no_answer() -> None:
    for rows, is_open in (([], True), ([row(BF16, 5.0, run="another")], True), ([row(BF16, OOM)], False)):
        verdict = decided([row(STOCK, 10.0), *rows], GPU)
        assert verdict.is_open is is_open
        assert ("keep" in codes(verdict)) is not is_open


# --- noise ------------------------------------------------------------------------------------------------------------


@BOTH
def test_nothing_is_confirmed_beside_a_baseline_that_was_only_measured_disturbed(machine: Machine) -> None:
    hit = [block(ms, contaminated_by=("foreign-process",)) for ms in (11.0, 11.2, 10.9)]
    assert decided(in_turn({STOCK: hit, BF16: [10.0, 10.02, 9.99]}), machine).keeps_the_baseline
    hit = [block(ms, contaminated_by=("foreign-process",)) for ms in (110.0, 112.0, 109.0)]
    verdict = decided(in_turn({STOCK: hit, BF16: [10.0, 10.02, 9.99]}), machine)
    assert (verdict.winner.policy, verdict.confidence) == (BF16, "likely")


# --- objectives -------------------------------------------------------------------------------------------------------


def test_a_policy_too_slow_for_the_memory_objective_cannot_win() -> None:
    failing = Policy(compile="default")
    columns = {STOCK: [took(10.0, 1000)] * 3, BF16: [took(9.5, 600)] * 3, FP16: [took(12.0, 400)] * 3}
    rows = [row(failing, OOM), *in_turn(columns)]
    verdict = decided(rows, GPU, MEMORY)
    assert [one.policy for one in verdict.contenders] == [BF16, STOCK, FP16, failing], "the best first, failures last"
    assert verdict.winner.policy == BF16
    assert verdict.gain.value == pytest.approx(1000 / 600, rel=0.01)
    assert verdict.speedup.value == pytest.approx(10 / 9.5, rel=0.01)
    assert lost(verdict, FP16).startswith("too slow: 0.83× [")
    assert "uses 0.60 " in message(verdict, "less-memory")
    assert decided(rows, GPU, objective_of("memory", 0.8)).winner.policy == FP16, "the least speed is the user's"


@pytest.mark.parametrize(
    ("columns", "rounds", "winner"),
    [
        # 2 MiB less are worth no speed: on an H200 fp16 had taken 46 ms and 3,901 MiB, bf16 37 ms and 3,903.
        ({STOCK: (48.8, 6499), FP16: (46.3, 3901), BF16: (37.1, 3903), BF16_LAST: (35.9, 3980)}, 3, BF16),
        ({STOCK: (10.0, 1000), BF16: (10.06, 500)}, 4, BF16),  # to a user that is the baseline's speed
        ({STOCK: (10.0, 1000), BF16: (10.2, 500)}, 4, STOCK),
    ],
)
def test_of_policies_that_use_about_the_same_memory_the_fastest_wins(
    columns: dict[Policy, tuple[float, float]], rounds: int, winner: Policy
) -> None:
    assert of_figures(columns, rounds=rounds).winner.policy == winner


def test_of_energy_the_least_per_sample_wins_and_who_has_none_cannot() -> None:
    def blocks(ms: float, joules: float | None) -> list[Measurement]:
        return [took(ms, energy_j_per_sample=joules)] * 3

    columns = {STOCK: blocks(10, 1.0), BF16: blocks(11, 0.5), FP16: blocks(5, None)}
    verdict = decided(in_turn(columns), GPU, ENERGY)
    assert verdict.winner.policy == BF16
    assert verdict.winner.energy_j_per_sample == pytest.approx(0.5)
    assert verdict.gain.value == pytest.approx(2.0, rel=0.05)
    assert verdict.speedup.value == pytest.approx(10 / 11, rel=0.02)
    assert lost(verdict, FP16) == "has no figure of energy"
    assert codes(verdict)[0] == "less-energy"


# --- what is told of each ---------------------------------------------------------------------------------------------


def test_every_contender_that_lost_says_why_and_the_winner_does_not() -> None:
    columns = {STOCK: [10.0] * 3, BF16: [5.0] * 3, FP16: [6.0] * 3, BF16_LAST: [12.0] * 3}
    equal, failing, barred = (Policy(autocast="bf16", cudnn_benchmark=True), Policy(compile="default"), equals(2)[1])
    early = Policy(threads=1)
    rows = [*in_turn({**columns, equal: [5.0] * 3, barred: [4.0] * 3}), row(failing, OOM, moment_s=50.0)]
    rows.append(row(early, block(32.0, abandoned=True), moment_s=52.0))
    verdict = decided(rows, GPU, bar=lambda policy: "not as good as FP32" if policy == barred else None)
    assert verdict.winner.policy == BF16
    assert verdict.winner.lost == lost(verdict, BF16) == ""
    assert lost(verdict, STOCK) == "bf16 is better"
    assert lost(verdict, FP16).startswith("behind bf16 by ")
    assert float(lost(verdict, FP16).removeprefix("behind bf16 by ").strip(" %")) == pytest.approx(20, abs=1)
    assert lost(verdict, BF16_LAST).startswith("not shown to be better than the baseline: 0.8")
    assert "sure" not in lost(verdict, BF16_LAST), "nobody asks how sure it is that a slower one is better"
    assert lost(verdict, early) == "at most 0.3× the speed of the baseline (ended early)"
    assert lost(verdict, equal) == "no better than bf16, and not simpler"
    assert lost(verdict, failing).startswith("failed: oom")
    assert lost(verdict, barred) == "not as good as FP32"


def test_each_fp32_rule_counts_as_a_departure_and_neither_the_users_batch_size_nor_master_weights_do() -> None:
    rules = (Fp32Rule(path="a"), Fp32Rule(path="b"))
    assert departure_count(Policy(batch_size=32, accumulate=2)) == 0
    assert departure_count(Policy(autocast="bf16", batch_size=32)) == 1
    assert departure_count(Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)) == 1
    assert departure_count(Policy(autocast="bf16", fp32_modules=rules)) == 3


# --- what training pays -----------------------------------------------------------------------------------------------


def loops(columns: Mapping[Policy, Sequence[float]], **more: Any) -> list[Row]:
    return in_turn(
        {policy: [block(ms, in_loop=True, **more) for ms in times] for policy, times in columns.items()},
        start_s=100.0,
    )


def timed(policy: Policy, step_ms: Sequence[float], **more: Any) -> Row:
    return row(policy, replace(took(), step_ms=tuple(step_ms), **more))


GRAPH, OTHER_GRAPH = BF16.compiled("reduce-overhead"), BF16.compiled("default")
# As a model that stops at an exit chosen by data: 37 ms on batches that come again, 263 on new ones.
TRIALS = [row(STOCK, 58.0), row(GRAPH, 37.0), row(OTHER_GRAPH, 39.0)]
CONTRADICTED = [*TRIALS, timed(GRAPH, [263.0] * 9, settled=False, in_loop=True)]
COMPILING = [row(STOCK, 40.0), timed(BF16, [18.0] * 9, settled=False), row(FP16, 30.0)]
EVEN = [*in_turn({STOCK: [10.0] * 4, BF16: [5.0] * 4, FP16: [4.998] * 4}), *loops({STOCK: [10.0] * 2})]


@pytest.mark.parametrize(
    ("rows", "winner"),
    [
        (CONTRADICTED, STOCK),
        ([*CONTRADICTED, row(BF16, 40.0)], BF16),  # it has no graphs
        ([*CONTRADICTED, *loops({STOCK: [40.0] * 2, OTHER_GRAPH: [30.0] * 2})], OTHER_GRAPH),
        # A policy that still compiles cannot win until it settles in a later block.
        (COMPILING, FP16),
        ([*COMPILING, row(BF16, 20.0, launch="1")], BF16),
        # Of level and equally simple policies the one that the loop has timed wins.
        (EVEN, FP16),
        ([*EVEN, *loops({BF16: [5.0] * 2})], BF16),
    ],
)
def test_what_the_loop_says_and_whether_a_policy_settles_decides_who_can_win(rows: list[Row], winner: Policy) -> None:
    assert decided(rows, GPU).winner.policy == winner


def test_a_graph_that_had_no_turn_leads_and_cannot_win_once_others_kept_coming_in_the_loop() -> None:
    verdict = decided(CONTRADICTED, GPU)
    assert "compiled or recorded anew" in lost(verdict, GRAPH)
    assert "has not timed this one" in lost(verdict, OTHER_GRAPH)
    assert verdict.leader is not None
    assert verdict.leader.policy == OTHER_GRAPH, "it is the next to get a turn in the loop"
