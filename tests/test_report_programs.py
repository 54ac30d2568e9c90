"""The programs of reports/ that have no test file of their own: their pure parts."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "reports"))  # programs, no package

import autotune
import beside_compiling
import busy_claims
import costs
import parity
import replay
import suite
import torch
from simulated.landscape import Replay

from amptune.measure.results.outcome import Effort
from amptune.policy.settings import STOCK, Policy

# --- pytorch-autotune ------------------------------------------------------------------------------------------------


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


# --- costs ---------------------------------------------------------------------------------------------------------


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
