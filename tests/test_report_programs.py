"""The programs that hold the answers against an oracle and a rival: their pure parts."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

sys.path.append(str(Path(__file__).parent.parent / "reports"))  # programs, no package

import autotune
import batch_sizes
import beside_compiling
import busy_claims
import comparison
import costs
import oracle
import parity
import rejudge
import replay
import rivals
import sittings
import stored
import suite
import torch
import trust
from measurements import took
from simulated.landscape import NO_TROUBLE, Replay, SimulatedClock, SyntheticEvaluator, landscape_of

from amptune.errors import AmptuneError
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome, outcome_from_dict
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import STOCK, WHOLE_MODES, CompileMode, Policy
from amptune.search.plan.budget import Budget
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row
from amptune.workload.targets import load_workload, parse_target

MACHINE = {"workload": "w", "hardware": "H", "software": {}, "model": "m", "batch_size": 64, "convolutions": False}


def measured(ms: float) -> Measurement:
    return took(ms, 10.0, samples_per_step=64)


def row(policy: Policy, ms: float, seconds: float = 1.0) -> oracle.Row:
    outcome: Outcome = Failure(kind="oom", message="full") if math.isinf(ms) else measured(ms)
    return oracle.Row(policy=policy, outcome=outcome, seconds=seconds)


def all_eager() -> oracle.Oracle:
    """Each slower than the one before."""
    eager = oracle.eager_policies(convolutions=False)
    return oracle.Oracle(machine=MACHINE, rows=tuple(row(policy, 1.0 + i) for i, policy in enumerate(eager)))


class Answers:
    """Stands for the workers; counts what it was asked."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.asked: list[Policy] = []
        self.compile_limits_s: list[float] = []

    compiling: tuple[Policy, ...] = ()

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:  # noqa: ARG002
        self.compile_limits_s.append(limit_s)

    def measure(self, policy: Policy, effort: Effort) -> Outcome:  # noqa: ARG002
        self.asked.append(policy)
        return self.outcome


# --- the oracle ---------------------------------------------------------------------------------------------------


def test_the_grid_is_every_eager_policy_once() -> None:
    grid = oracle.eager_policies(convolutions=True)
    # autocast off with three FP32 modes, two dtypes with one; layout, cudnn.benchmark, fused optimizer
    assert len(set(grid)) == len(grid) == (3 + 2) * 2 * 2 * 2
    assert len(oracle.eager_policies(convolutions=False)) == (3 + 2) * 2
    assert STOCK in grid


def test_every_mode_is_compiled_on_the_fastest_of_each_kind() -> None:
    missing = all_eager().missing()
    kinds: dict[tuple[str, str], Policy] = {}
    for found in all_eager().fastest():
        kinds.setdefault((found.policy.autocast, found.policy.memory_format), found.policy)
    fastest = list(kinds.values())[:4]
    recorded = {replace(policy, cuda_graphs=True) for policy in fastest}
    assert len(missing) == len(fastest) * (1 + len(WHOLE_MODES))
    assert set(missing) == recorded | {policy.compiled(mode) for policy in fastest for mode in WHOLE_MODES}
    assert set(missing[: len(fastest)]) == recorded
    assert set(WHOLE_MODES) == set(get_args(CompileMode)) - {"off", "blocks"}


def test_a_row_comes_back_from_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    rows = [row(STOCK, 2.0), row(Policy(autocast="bf16"), math.inf)]
    for line in (MACHINE, *(one.to_line() for one in rows)):
        oracle.append(path, line)
    assert oracle.read(path) == oracle.Oracle(machine=MACHINE, rows=tuple(rows))


def test_half_a_line_is_dropped_and_its_policy_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    oracle.append(path, MACHINE)
    with path.open("a") as file:
        file.write(json.dumps(row(STOCK, 2.0).to_line())[:20])
    found = oracle.read(path)
    assert found is not None
    assert STOCK in found.missing()
    oracle.append(path, row(STOCK, 3.0).to_line())
    again = oracle.read(path)
    assert again is not None
    assert [one.ms for one in again.rows] == [3.0]


def test_nothing_is_read_from_a_file_without_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"schema"')
    assert oracle.read(tmp_path / "w.jsonl") is None
    assert oracle.read(tmp_path / "other.jsonl") is None


def test_of_a_policy_measured_again_the_last_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    for line in (MACHINE, row(STOCK, math.inf, seconds=9.0).to_line(), row(STOCK, 2.0).to_line()):
        oracle.append(path, line)
    found = oracle.read(path)
    assert found is not None
    assert (found.seconds, found.rows[0].ms) == (1.0, 2.0)


def test_what_the_limit_cut_short_is_no_row(tmp_path: Path) -> None:
    evaluator = Answers(Failure(kind="timeout", message="no answer"))
    start = oracle.Oracle(machine=MACHINE)
    left: Any = oracle.measure_missing(start, evaluator, tmp_path / "w.jsonl", Budget(seconds=20))  # type: ignore[arg-type]
    assert left.rows == ()
    assert len(evaluator.asked) == 1


def test_compiling_has_no_more_time_than_the_command(tmp_path: Path) -> None:
    evaluator = Answers(Failure(kind="timeout", message="no answer"))
    recorded = tuple(row(policy, 1.0) for policy in all_eager().missing() if policy.cuda_graphs)
    start = replace(all_eager(), rows=(*all_eager().rows, *recorded))
    oracle.measure_missing(start, evaluator, tmp_path / "w.jsonl", Budget(seconds=30))  # type: ignore[arg-type]
    assert evaluator.compile_limits_s
    assert max(evaluator.compile_limits_s) <= 30


def test_a_timeout_of_its_own_is_a_row() -> None:
    evaluator = Answers(Failure(kind="timeout", message="no answer"))
    found = oracle.measured(STOCK, oracle.Oracle(machine=MACHINE), evaluator, Budget(seconds=1000), 0.0)  # type: ignore[arg-type]
    assert found is not None
    assert math.isinf(found.ms)


def test_a_trial_that_will_not_fit_gives_way_to_one_that_does() -> None:
    compiled = all_eager().missing()
    dear = row(compiled[0], 0.5, seconds=100.0)
    after = replace(all_eager(), rows=(*all_eager().rows, dear))
    following = oracle.next_policies(after, left_s=80.0)
    assert following
    assert compiled[0].compile not in {policy.compile for policy in following}
    assert oracle.next_policies(after, left_s=5.0) == []


def test_graphs_are_compiled_beside_one_another_and_kernels_are_timed_alone() -> None:
    recorded = tuple(row(policy, 1.0) for policy in all_eager().missing() if policy.cuda_graphs)
    oracles = [replace(all_eager(), rows=(*all_eager().rows, *recorded))]
    while policies := oracle.next_policies(oracles[-1], left_s=math.inf):
        oracles.append(replace(oracles[-1], rows=(*oracles[-1].rows, *(row(p, 1.0) for p in policies))))
    added = [set(b.rows) - set(a.rows) for a, b in pairwise(oracles)]
    modes = [{one.policy.compile for one in rows} for rows in added]
    assert modes[0] == {"default", "reduce-overhead"}
    assert all(len(rows) == 1 for rows in added[1:])
    assert {mode for some in modes[1:] for mode in some} == {"max-autotune", "max-autotune-no-cudagraphs"}


def test_what_the_plain_eager_policies_tell_is_compiled_before_cudnn_searches_for_plans() -> None:
    machine = {**MACHINE, "convolutions": True}
    plain = [p for p in oracle.eager_policies(convolutions=True) if not p.cudnn_benchmark]
    missing = oracle.Oracle(machine=machine, rows=tuple(row(policy, 1.0) for policy in plain)).missing()
    missing = [policy for policy in missing if not policy.cuda_graphs]
    kinds = [(policy.compile, policy.cudnn_benchmark) for policy in missing]
    assert kinds[0] == ("default", False)
    assert kinds.index(("off", True)) > kinds.index(("reduce-overhead", False))
    assert kinds.index(("off", True)) < kinds.index(("max-autotune", False))
    assert not any(benchmark for mode, benchmark in kinds if mode != "off")


def test_rows_of_two_machines_do_not_come_into_one_file() -> None:
    with pytest.raises(AmptuneError, match="hardware was H and is X; choose another --out"):
        oracle.require_the_same(MACHINE, {**MACHINE, "hardware": "X"}, Path("w.jsonl"))


def test_the_caches_of_the_compiler_are_empty_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with oracle.compile_caches() as folder:
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == folder
        assert not list(folder.iterdir())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_the_caches_of_the_compiler_can_be_kept(tmp_path: Path) -> None:
    with oracle.compile_caches(tmp_path / "kept") as folder:
        (Path(os.environ["TRITON_CACHE_DIR"]).parent / "graph").touch()
    assert (folder / "graph").exists()


def test_the_table_of_the_oracle_names_its_best() -> None:
    text = oracle.table([all_eager()])
    assert "| w | 10 | 0 | 15 | " in text
    assert "| 1.000 | 1.000 | 10 | bf16 |" in text


# --- the rivals ---------------------------------------------------------------------------------------------------


CHOSEN = {"precision": "amp_bf16", "compile": "reduce-overhead", "channels_last": True, "fused_opt": True}


def test_the_choice_of_pytorch_autotune_becomes_a_policy() -> None:
    assert autotune.policy_of_autotune(CHOSEN, fused=False) == Policy(
        autocast="bf16",
        fp32_math="tf32",
        memory_format="channels_last",
        cudnn_benchmark=True,
        compile="reduce-overhead",
    )


def test_its_plain_fp32_is_stock_pytorch() -> None:
    plain = {"precision": "fp32_default", "compile": "off", "channels_last": False, "fused_opt": False}
    assert autotune.policy_of_autotune(plain, fused=False) == STOCK


def entry(at_s: float, policy: Policy, ms: float | None, what: str = "trial") -> dict[str, Any]:
    return {"at_s": at_s, "what": what, "policy": policy_to_dict(policy), "ms_per_sample": ms}


BF16, FP16 = Policy(autocast="bf16"), Policy(autocast="fp16")


def test_an_answer_is_near_from_when_the_best_trial_stays_near() -> None:
    timeline = [entry(10, STOCK, 2.0), entry(30, FP16, 1.02), entry(90, replace(BF16, batch_size=64), 1.0)]
    assert rivals.approach(timeline, BF16) == (1.02, 30)


def test_a_lucky_trial_is_valued_by_all_of_its_measurements() -> None:
    timeline = [
        entry(10, FP16, 0.9),
        entry(20, BF16, 1.0),
        entry(50, FP16, 1.5, "finals"),
        entry(51, FP16, 1.5, "finals"),
    ]
    assert rivals.approach(timeline, BF16) == (1.5, None)


def test_nothing_is_said_of_an_answer_that_was_not_measured() -> None:
    assert rivals.approach([entry(10, STOCK, 2.0)], BF16) == (None, None)


def compared() -> dict[str, Any]:
    """What rivals.py writes, with two launches; pytorch-autotune died."""
    times = {"stock": 4.0, "amp bf16": 2.0, "amptune": 1.0, "oracle 1": 1.0, "oracle 2": 0.9}
    policies = {
        "stock": STOCK,
        "amp bf16": BF16,
        "amptune": FP16,
        "oracle 1": FP16,
        "oracle 2": Policy(fp32_math="tf32"),
    }
    rows = [rivals._line(policies[name], measured(ms)) for name, ms in times.items()]
    return {
        "workload": "w",
        "amptune": {"seconds": 20.0, "timeline": [entry(10, FP16, 1.0)]},
        "autotune": {"seconds": 3.0, "failure": "exit code 1: it crashed"},
        "comparison": {
            "machine": MACHINE,
            "contenders": {name: policy_to_dict(policy) for name, policy in policies.items()},
            "rounds": [{"launch": launch, "rows": rows} for launch in range(2)],
        },
    }


def test_the_figures_of_a_comparison_come_from_its_raw_samples() -> None:
    everything = replace(all_eager(), rows=tuple(replace(one, seconds=20.0) for one in all_eager().rows))
    summary = rivals.summary_of(compared(), everything)
    assert summary.vs_oracle is not None
    assert summary.vs_oracle.value == pytest.approx(1 / 0.9)
    assert summary.vs_amp is not None
    assert summary.vs_amp.value == pytest.approx(2.0)
    assert summary.vs_autotune is None
    assert summary.share_of_time == pytest.approx(0.1)


def test_a_rival_that_crashed_stands_in_the_table_with_its_failure(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(json.dumps(compared()))
    for line in (MACHINE, row(STOCK, 4.0, seconds=100.0).to_line()):
        oracle.append(tmp_path / "w.jsonl", line)
    text = rivals.table(tmp_path, tmp_path)
    assert "w: pytorch-autotune failed: exit code 1: it crashed" in text
    assert "| **geometric mean** |" in text
    assert "20.0%" in text


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    assert autotune.run_alone([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", 1.0) is None
    assert autotune.run_alone([sys.executable, "-c", "print('so'); raise SystemExit(3)"], tmp_path / "log", 120.0) == 3
    assert autotune.last_line((tmp_path / "log").read_text()) == "so"


def test_a_workload_is_split_into_what_its_model_is_given_and_its_loss() -> None:
    torch = pytest.importorskip("torch")
    from amptune.workload.zoo import workload

    one = workload("digits")
    batch = one.batch(4)
    model = one.model()
    given = autotune.what_the_model_is_given(one, batch)
    assert one.loss is not None
    whole, split = one.loss(model, batch), autotune.loss_behind(one, model(given), batch)
    assert torch.equal(whole, split)


def test_only_an_optimizer_it_knows_by_name_can_be_fused() -> None:
    from amptune.workload.zoo import workload
    from amptune.workload.zoo.recipes import adamw

    one = workload("digits")
    model = one.model()
    assert callable(autotune.optimizer_of(one, model)[0])
    assert autotune.optimizer_of(replace(one, optimizer=adamw), model) == ("adamw", 1e-4)


# --- comparisons ---------------------------------------------------------------------------------------------------


def simulated() -> SyntheticEvaluator:
    return SyntheticEvaluator(landscape_of("resnet50"), SimulatedClock(), NO_TROUBLE, 0)


def in_turn(machine: SyntheticEvaluator, policies: Sequence[Policy], budget_s: float, **more: Any) -> list[Row]:
    budget = Budget(seconds=budget_s, clock=machine.clock)
    return comparison.measured_in_turn(machine, machine.landscape.prepared, policies, budget, lambda _: None, **more)


def test_policies_are_measured_in_turn_until_their_ratio_is_known() -> None:
    machine = simulated()
    rows = in_turn(machine, [STOCK, BF16], 600.0)
    first = next(comparison.rounds_of(rows))
    assert {row.policy for row in first} == {STOCK, BF16}
    ratio = trust.judged(rows, STOCK, "cuda").scores.between(BF16, STOCK)
    assert ratio is not None
    assert ratio.low <= machine.landscape.true_ms(STOCK) / machine.landscape.true_ms(BF16) <= ratio.high
    assert machine.clock() < 600.0


def test_a_policy_that_failed_before_enters_a_comparison_with_its_failure() -> None:
    failure = Failure(kind="oom", message="full")
    machine = simulated()
    rows = in_turn(machine, [STOCK, BF16, FP16], 60.0, tried=[(FP16, failure), (BF16, measured(1.0))])
    assert FP16 not in machine.measured
    assert [row.outcome for row in rows if row.policy == FP16] == [failure]


def test_rounds_come_back_from_a_file_as_they_were() -> None:
    rounds = [("0", [(STOCK, measured(2.0)), (BF16, measured(1.0))]), ("0", [(BF16, measured(1.1))])]
    rounds += [("1", [(STOCK, measured(2.1))])]
    rows = comparison.rows_of(rounds)
    assert [(one[0].launch, [(row.policy, row.outcome) for row in one]) for one in comparison.rounds_of(rows)] == rounds
    assert comparison.launches_of(rows) == ["0", "1"]
    assert sorted(row.moment_s for row in rows) == [row.moment_s for row in rows]


def test_the_medians_of_a_comparison_stand_in_a_list_for_each_launch() -> None:
    rows = comparison.rows_of(
        [("0", [(STOCK, measured(2.0)), (BF16, Failure(kind="oom", message="full"))]), ("1", [(STOCK, measured(3.0))])]
    )
    kept = trust.comparison_of(rows)
    assert [one["median_ms"] for one in kept["contenders"]] == [[[2.0], [3.0]]]
    assert kept["failed"] == ["bf16: oom: full"]
    assert trust.comparisons_in(Path("nowhere")) == []


# --- replays -------------------------------------------------------------------------------------------------------


def replayed(true_speedup: float, claim: tuple[float, float, float] | None, confidence: str, regret: float) -> Replay:
    return Replay(
        workload="w",
        seed=0,
        chosen="a",
        best="b",
        regret=regret,
        search_regret=0.0,
        finals_regret=0.0,
        true_speedup=true_speedup,
        next_speedup=1.05 * true_speedup,
        claim=claim,
        confidence=confidence,
        trials=10,
        launches=3,
        simulated_s=300.0,
        wall_s=1.0,
    )


def test_the_table_of_replays_counts_confirmed_claims_and_what_is_left_open() -> None:
    rows = [
        replayed(1.5, (1.5, 1.4, 1.6), "confirmed", 0.0),
        replayed(0.9, (1.2, 1.1, 1.3), "confirmed", 0.1),
        replayed(1.5, (1.2, 1.1, 1.3), "likely", 0.0),
        replayed(1.0, None, "undecided", 0.5),
    ]
    heads, _, *lines = replay.table(rows).splitlines()
    cells = dict(zip(heads.split(" | "), lines[-1].split(" | "), strict=True))
    assert cells["confirmed"] == "66.7 %"
    assert cells["confirmed wrong"] == "50.0 %"
    assert (cells["claim holds"], cells["holds later"]) == ("33.3 %", "33.3 %")
    assert cells["left open"] == "33.3 %"
    assert "| 4 | 75.0 % | 50.0 % |" in replay.null_table(rows)


# --- sittings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(sittings.CPU))
def test_a_model_of_the_sittings_can_be_trained(name: str) -> None:
    workload = load_workload(parse_target(f"{sittings.__file__}:{name}"))
    assert workload.loss is not None
    model = workload.model()
    workload.loss(model, workload.batch(2)).backward()  # type: ignore[no-untyped-call]
    assert next(model.parameters()).grad is not None


def test_the_models_of_the_sittings_are_many_and_none_is_compared_with_stock_alone() -> None:
    for models in (sittings.CPU, sittings.GPU):
        assert len(models) >= 14
        assert all(len(policies) == 3 and STOCK not in policies for policies in models.values())


def test_a_sitting_writes_a_line_for_every_policy_of_every_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched: list[Sequence[Policy]] = []

    class Workers(Answers):
        def __init__(self, *_: object) -> None:
            super().__init__(measured(2.0))

        def __enter__(self) -> Workers:
            return self

        def __exit__(self, *_: object) -> None: ...

        def prepare(self, limit_s: float) -> None: ...

        def launch(self, policies: Sequence[Policy]) -> None:
            launched.append(policies)

    monkeypatch.setattr(sittings, "WorkerEvaluator", Workers)
    out = tmp_path / "folder" / "one.jsonl"
    command = ["sittings.py", "--only", "cpu_lstm", "--out", str(out), "--launches", "2", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", command)
    for _ in range(2):  # a second command adds its lines
        assert sittings.main() == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    policies = (STOCK, *sittings.CPU["cpu_lstm"])
    assert launched == 4 * [policies]
    assert len(lines) == 2 * 2 * 3 * len(policies)
    assert [line["launch"] for line in lines[: 3 * len(policies)]] == 3 * len(policies) * [0]
    assert {policy_from_dict(line["policy"]) for line in lines[: len(policies)]} == set(policies)
    assert {line["model"] for line in lines} == {"cpu_lstm"}
    assert all(outcome_from_dict(line["outcome"]) == measured(2.0) for line in lines)


# --- judged anew ---------------------------------------------------------------------------------------------------


EVERYTHING = list(stored.everything())


def test_every_comparison_that_is_stored_is_judged_anew() -> None:
    files = {path.relative_to(stored.H200) for path in stored.H200.glob("**/*.json")}
    judged = {Path(one.file.partition(",")[0]) for one in EVERYTHING}
    assert {file for file in files - judged if file.parts[0] != "batch_sizes"} == set()
    assert all(rejudge.judged_anew(one) is not None for one in EVERYTHING)


def test_an_interval_of_then_was_doubled_for_few_launches() -> None:
    one, two, three = ([[1.01, 1.02, 1.03]] * count for count in (1, 2, 3))
    assert stored.former_ratio([[1.02]]).high == math.inf
    assert stored.former_ratio(three).half_width == 0.0
    assert stored.former_ratio(one).half_width > stored.former_ratio(two).half_width > 0.01
    assert stored.former_ratio(two, (0.5, 20)).half_width > 0.3
    assert stored.former_ratio(two, differ=0.5).half_width > 0.3


def judged_by_hand(then: float, now: float, *, faster: bool = True) -> rejudge.Judged:
    """Stock PyTorch took twice `now` ms and bf16 two ms; then, bf16 was said to be `then` times as fast."""
    rounds = [(launch, [(STOCK, measured(2 * now)), (BF16, measured(2.0))]) for launch in range(4)]
    said = stored.Said(policy=BF16, ratio=Ratio(value=then, low=then - 0.01, high=then + 0.01), faster=faster, sure="-")
    judged = rejudge.judged_anew(
        stored.Stored(file="f", workload="w", name="tuning", rows=comparison.rows_of(rounds), baseline=STOCK, then=said)
    )
    assert judged is not None
    return judged


def test_a_verdict_that_differs_is_told_from_an_interval_that_does() -> None:
    assert judged_by_hand(1.1, 0.9).change == rejudge.LOST
    assert judged_by_hand(1.0, 1.5, faster=False).change == rejudge.WON
    assert judged_by_hand(1.5, 1.5).change == rejudge.WIDER
    assert all(rejudge.reason(judged_by_hand(1.5, now)) for now in (0.9, 1.5))


def test_what_is_judged_anew_stands_in_a_table_and_in_groups() -> None:
    judged = [judged_by_hand(1.5, 1.5), judged_by_hand(1.1, 0.9)]
    lines = rejudge.table(judged).splitlines()
    assert len(lines) == 2 + len(judged)
    assert lines[2].startswith("| f | w | tuning | bf16 | 1.500× [1.490, 1.510], - | 1.500× [")
    told = "\n".join(rejudge.summary(judged))
    assert "- **faster → kept**, 1: " in told
    assert "- **wider**, 1: " in told


# --- beside graphs that compile ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_measured_while_a_graph_compiles_stands_beside_what_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_compiling, "MEASURED", {"eager": beside_compiling.EAGER})
    monkeypatch.setattr(beside_compiling, "BRIEF", Effort(warmup_s=0.0, measure_s=0.0, min_steps=1))
    line = beside_compiling.measured("amptune.workload.zoo:digits", "cpu", beside_compiling.OTHERS[1:])
    assert len(line["alone"]) == beside_compiling.ALONE
    assert {one["still"] for one in line["beside"]} == {False, True}
    assert line["compiled"]["fp16 default"] > 1.0


def test_what_is_measured_while_compilers_stand_still_is_told_from_what_is_measured_while_they_go_on() -> None:
    beside = [
        {"policy": "eager", "still": False, "ms": 18.0, "contaminated_by": []},
        {"policy": "eager", "still": False, "ms": 10.2, "contaminated_by": []},
        {"policy": "eager", "still": True, "ms": 10.1, "contaminated_by": []},
        {"policy": "eager", "still": True, "ms": 10.6, "contaminated_by": ["compiling"]},
    ]
    alone = [{"policy": "eager", "ms": 10.0}, {"policy": "default", "ms": 7.0}]
    line = {"target": "zoo:vit", "alone": alone, "beside": beside, "compiled": {"fp16 default": 27.4}}
    assert list(beside_compiling.rows(line)) == [
        "| vit | eager | 10.00 | 14.10 [10.20, 18.00] | 1 of 2 | 10.35 [10.10, 10.60] | 1 of 2 | 1 | fp16 default 27 |",
        "| vit | default | 7.00 | nan [nan, nan] | 0 of 0 | nan [nan, nan] | 0 of 0 | 0 | fp16 default 27 |",
    ]


@dataclass
class ThisMachine:
    """Stands for the `time` module: its time passes where a test says so."""

    now_s: float = 1000.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def this_machine(monkeypatch: pytest.MonkeyPatch) -> ThisMachine:
    machine = ThisMachine()
    monkeypatch.setattr(costs, "time", machine)
    return machine


# --- the largest batch --------------------------------------------------------------------------------------------


def a_device_of(largest: int, asked: list[list[int]]) -> Any:
    def run(sizes: list[int]) -> list[dict[str, Any]]:
        asked.append(sizes)
        return [{"tries": [{"batch_size": size, "ran": size <= largest}]} for size in sizes]

    return run


@pytest.mark.parametrize("largest", [1, 7, 97, 340, 5856])
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("beyond", [None, 9000])
def test_the_largest_batch_is_found_to_within_a_hundredth(largest: int, at_once: int, beyond: int | None) -> None:
    tries = [{"batch_size": 1, "ran": True}, *([{"batch_size": beyond, "ran": False}] if beyond else [])]
    asked: list[list[int]] = []
    data = {"finders": {"amptune": {"tries": tries}}}
    truth = batch_sizes.the_truth(data, a_device_of(largest, asked), lambda: 1.0, at_once)
    assert truth["within_1_percent"]
    assert truth["largest"] <= largest < truth["smallest_oom"]
    assert largest - truth["largest"] <= max(1, 0.01 * largest)
    assert all(len(sizes) <= at_once for sizes in asked)


def test_a_try_that_says_nothing_ends_the_looking() -> None:
    data = {"finders": {"amptune": {"tries": [{"batch_size": 8, "ran": True}]}}}
    truth = batch_sizes.the_truth(data, lambda sizes: [{"tries": []} for _ in sizes], lambda: 1.0, 4)
    assert (truth["largest"], truth["within_1_percent"]) == (8, False)


def test_what_a_step_costs_more_is_told_with_an_interval_around_it(
    this_machine: ThisMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "BLOCKS", 20)
    noise = random.Random(0)

    def step_of(seconds: float) -> Callable[[], None]:
        def step() -> None:
            this_machine.now_s += seconds * noise.uniform(0.9, 1.1)

        return step

    cost = costs.difference("waiting", "step", step_of(1e-4), step_of(3e-4), steps=2, times=2)
    assert cost.first_us == pytest.approx(50, rel=0.1)
    assert cost.difference_us == pytest.approx(100, rel=0.1)
    assert cost.low_us < cost.difference_us < cost.high_us
    assert cost.high_us - cost.low_us < 20


def test_the_recipe_by_hand_trains_as_the_policy_does() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
    twins = copy.deepcopy(model), copy.deepcopy(model)
    steps = costs.by_hand(twins[0], x, "bf16"), costs.under(Policy(autocast="bf16"), twins[1], x)
    for step in steps:
        step()
        step()
    assert torch.equal(twins[0].weight, twins[1].weight)
    assert not torch.equal(twins[0].weight, model.weight)


@pytest.mark.slow
def test_the_start_is_timed_with_a_policy_that_fits_this_machine() -> None:
    for tuned in (False, True):
        assert costs.started(torch.device("cpu"), tuned=tuned) > 0


@pytest.mark.slow
def test_a_place_that_no_test_notices_is_told(tmp_path: Path) -> None:
    test = "tests/policy/test_presets.py"
    seen = {"file": "amptune/policy/policy_file.py", "old": "def is_preset", "new": "def was_preset", "test": test}
    unseen = {**seen, "old": '"""', "new": '"""'}
    dull = {"file": "amptune/search/table/trial.py", "old": "from __future__", "new": "from  __future__", "test": test}
    assert suite.broken([seen], tmp_path / "seen.txt") == 0
    assert suite.broken([seen, unseen, dull], tmp_path / "all.txt") == 1
    told = [line.split()[0] for line in (tmp_path / "all.txt").read_text().splitlines()[::2]]
    assert told == ["noticed", "no", "passes"]


def test_every_place_that_is_to_be_broken_is_still_there() -> None:
    """Whoever moves a module or a test moves it here too."""
    root = Path(suite.__file__).resolve().parent.parent
    for place in json.loads((root / "reports" / "suite" / "breaks.json").read_text()):
        assert (root / place["file"]).read_text().count(place["old"]) == 1, place
        file, _, test = place["test"].partition("::")
        assert f"def {test.partition('[')[0]}(" in (root / file).read_text() if test else (root / file).exists(), place


def test_a_run_of_the_suite_is_told_in_a_line() -> None:
    row = {"target": "test", "busy": True, "seconds": 301.2, "tests": 12, "exit_code": 1, "failed": ["a::b"]}
    assert suite.told(row) == "make test, beside other work: 301 s, 12 tests, exit 1, failed: a::b"


def test_the_table_of_parity_has_means_and_deviations_and_counts_the_runs_that_broke() -> None:
    rows: list[dict[str, Any]] = [
        {"model": "digits", "precision": precision, "seed": seed, "evaluated": 0.95 + seed / 50}
        for seed in (0, 1)
        for precision in ("FP32", "bf16")
    ]
    rows += [{"model": "digits", "precision": "fp16", "seed": seed, "failure": "nonfinite: nan"} for seed in (0, 1)]
    assert list(parity.table_of(rows)) == [
        "| model | FP32 | bf16 | fp16 | seeds |",
        "|---|---|---|---|---|",
        "| digits | 0.9600 ± 0.0141 | 0.9600 ± 0.0141 | - (2 of 2 broke) | 2 |",
    ]


def test_the_sources_of_parity_are_bytes_of_the_standard_library_and_held_out_modules_are_others() -> None:
    seen, held_out = parity._bytes()
    assert len(seen) > 5 * len(held_out) > 0
    batch = parity.sources().batch(3)
    assert batch.shape == (3, parity.CONTEXT + 1)
    assert batch.max() < 256


# --- claims beside a busy core ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workload", "half"), [("nothing", 24), ("fifth", 19)])
def test_a_gain_is_planted_in_the_steps_under_autocast(
    workload: str, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[torch.dtype] = []
    monkeypatch.setattr(torch, "mm", lambda left, _right, **_: products.append(left.dtype))
    planted = getattr(busy_claims, workload)()
    model, batch = planted.model(), planted.batch(8)
    for enabled, count in ((False, 24), (True, half)):
        products.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            planted.loss(model, batch)
        assert products == [torch.float64] * count


def test_every_policy_that_a_tuning_claims_is_a_claim() -> None:
    lines = [
        {"question": "tune, nothing gained", "answer": answer} for answer in ("keep", "bf16", "fp16", "keep", "keep")
    ] + [{"question": "verify, raised", "answer": answer} for answer in ("open", "missed", "open")]
    rows = busy_claims.table(lines).splitlines()
    assert rows[2] == "| tune, nothing gained | 5 | 2 claimed, 3 keep |"
    assert rows[6] == "| verify, raised | 3 | 1 missed, 2 open |"
