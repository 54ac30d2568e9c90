"""The program that tunes models outside the zoo: its plain loop, how it goes on, and what its table says."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "reports"))  # programs, no package

import foreign
import foreign_models
import foreign_table
import oracle
import plain_loop
from measurements import took

import amptune
from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import STOCK, Fp32Rule, Policy
from amptune.search.events import TrialEnded
from amptune.search.plan.budget import Budget
from amptune.search.table.trial import Trial

FUSED, BF16 = Policy(fused_optimizer=True), Policy(autocast="bf16")
CHOSEN = {"precision": "fp32_default", "compile": "off", "channels_last": False, "fused_opt": False}

TINY = """
import torch
from torch import nn
import amptune
workload = amptune.Workload(
    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
    batch=lambda n: (torch.randn(n, 4), torch.randint(2, (n,))),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    batch_size=8,
)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "tiny.py").write_text(TINY)
    return f"{tmp_path / 'tiny.py'}:workload"


@pytest.mark.parametrize("model", foreign_table.MODELS)
def test_every_model_is_a_target_and_needs_its_library_only_to_build_it(model: str) -> None:
    workload = getattr(foreign_models, model)()
    assert workload.name == model
    assert foreign.target_of(model).endswith(f"foreign_models.py:{model}")


# --- the plain loop ------------------------------------------------------------------------------------------------


def test_arms_train_in_processes_of_their_own_and_one_may_fail(target: str, tmp_path: Path) -> None:
    unknown = Policy(fp32_modules=(Fp32Rule(path="nowhere"),))
    arms = [
        plain_loop.Arm(names=(name,), policy=policy, caches=tmp_path / "caches")
        for name, policy in (("stock", STOCK), ("unknown", unknown))
    ]
    rows = {row["names"][0]: row for row in plain_loop.in_turn(arms, target, "cpu", Budget(seconds=300))}
    assert rows["stock"]["failure"] is None
    assert len(rows["stock"]["ms"]) == plain_loop.BLOCKS
    assert all(ms > 0 and math.isfinite(ms) for ms in rows["stock"]["ms"])
    assert "nowhere" in rows["unknown"]["failure"]


def test_what_the_limit_cuts_short_is_no_row(target: str, tmp_path: Path) -> None:
    arms = [plain_loop.Arm(names=("stock",), policy=STOCK, caches=tmp_path / "caches")]
    with pytest.raises(plain_loop.LimitReachedError):
        plain_loop.in_turn(arms, target, "cpu", Budget(seconds=0))


def test_the_other_tuner_is_searched_and_its_step_built_again(target: str, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_autotune", reason="pytorch-autotune is not installed")
    evidence = foreign_table.Evidence(tmp_path / "workload.jsonl")
    work = foreign.Work(
        evidence=evidence,
        target=target,
        budget_s=30.0,
        limit=Budget(seconds=300),
        device="cpu",
        launches=1,
        caches=tmp_path / "caches",
        autotune=True,
        course=False,
    )
    assert foreign.autotuned(work)
    (found,) = evidence.of("pytorch-autotune")
    assert found["failure"] is None
    assert found["fuses"]
    assert found["report"]["trials"][0]["at_s"] > 0
    (arm,) = (arm for arm in foreign.arms_of(work) if arm.names == ("its own step",))
    (row,) = work.in_turn([arm])
    assert row["failure"] is None
    assert len(row["ms"]) == plain_loop.BLOCKS


# --- going on ------------------------------------------------------------------------------------------------------


class Doubles:
    """Stand for tuners and launches; count what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tunings: list[float] = []
        self.launches: list[list[str]] = []
        monkeypatch.setattr(amptune, "tune", self.tune)
        monkeypatch.setattr(foreign, "answer_of", self.answer_of)
        monkeypatch.setattr(foreign, "in_turn", self.in_turn)
        there = ModuleType("pytorch_autotune")
        there.__spec__ = ModuleSpec("pytorch_autotune", None)
        monkeypatch.setitem(sys.modules, "pytorch_autotune", there)

    def tune(self, _: str, *, budget_s: float, observer: Any, **__: Any) -> Any:
        self.tunings.append(budget_s)
        trial = Trial(number=0, policy=FUSED, outcome=took(1.0, 10.0, samples_per_step=8), seconds=1.0)
        observer(TrialEnded(trial=trial, best=trial, baseline=trial, left_s=1.0))
        return SimpleNamespace(
            winner=FUSED,
            speedup=SimpleNamespace(value=2.0, low=1.9, high=2.1),
            provisional=False,
            findings=(),
            hardware=SimpleNamespace(name="H", software=SimpleNamespace(torch="2")),
            subject=SimpleNamespace(convolution_dims=frozenset({2})),
        )

    def answer_of(self, *asked: Any) -> Any:
        budget_s = asked[3]
        self.tunings.append(-budget_s)
        trials = [{"config": CHOSEN, "status": "ok", "ms_per_step": 2.0, "at_s": 5.0}]
        found = {"config": CHOSEN, "fused": False, "fuses": True, "search_s": 70.0, "report": {"trials": trials}}
        return {"budget_s": budget_s, "seconds": 80.0, "failure": None, **found}

    def in_turn(self, arms: Sequence[plain_loop.Arm], *_: Any, **__: Any) -> list[foreign_table.Line]:
        self.launches.append([name for arm in arms for name in arm.names])
        return [
            launch_row(arm.names, 1.0 if "amptune" in arm.names else 2.0, arm.policy and policy_to_dict(arm.policy))
            for arm in arms
        ]


def launch_row(names: Sequence[str], ms: float, policy: Any = None) -> foreign_table.Line:
    return {"names": list(names), "policy": policy, "failure": None, "ms": [ms, ms], "launch_s": 10.0}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["foreign.py", *arguments])
    assert foreign.main() == 0


def test_a_command_does_only_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doubles = Doubles(monkeypatch)
    command = ["swin_t", "--out", str(tmp_path), "--caches", str(tmp_path / "caches")]
    run(monkeypatch, *command)
    assert doubles.tunings == [120.0, -120.0, 60.0, 300.0]  # the other tuner's 70 s serve 300 s too
    assert len(foreign_table.Evidence(tmp_path / "swin_t.jsonl").of("grid")) == 18 + foreign_table.FASTEST
    assert doubles.launches[0] == ["stock", "pytorch-autotune", "amp bf16", "amp fp16", "amptune", "its own step"]
    assert {"grid 1", "grid 2", "grid 3"} <= set(doubles.launches[-1])
    before = (tmp_path / "swin_t.jsonl").read_text()
    run(monkeypatch, *command)
    assert (tmp_path / "swin_t.jsonl").read_text() == before
    run(monkeypatch, *command, "--launches", "4", "--budget", "60")
    assert doubles.tunings == [120.0, -120.0, 60.0, 300.0]
    assert len({line["launch"] for line in foreign_table.Evidence(tmp_path / "swin_t.jsonl").of("launch", 60.0)}) == 4


def test_nothing_is_begun_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doubles = Doubles(monkeypatch)
    run(monkeypatch, "swin_t", "--out", str(tmp_path), "--caches", str(tmp_path / "caches"), "--limit", "100")
    assert doubles.tunings == [60.0]  # 120 s do not fit, 60 s do
    assert len(doubles.launches) == 3


def test_the_course_is_trained_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doubles = Doubles(monkeypatch)
    run(monkeypatch, "r3d_18", "--budget", "120", "--out", str(tmp_path), "--caches", str(tmp_path / "c"), "--course")
    assert [name for names in doubles.launches for name in names].count("course") == 2
    evidence = foreign_table.Evidence(tmp_path / "r3d_18.jsonl")
    told = [(who, at_s >= 0, policy) for who, at_s, policy in foreign.best_so_far(evidence, 120.0)]
    assert told == [("amptune", True, FUSED), ("pytorch-autotune", True, STOCK)]


@pytest.mark.slow
def test_the_whole_program_runs_on_a_tiny_model(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--no-autotune"] if importlib.util.find_spec("pytorch_autotune") is None else []
    out = str(tmp_path / "out")
    run(monkeypatch, target, "--out", out, "--budget", "40", "--device", "cpu", "--launches", "1", *more)
    (line, *_) = foreign_table.Evidence(tmp_path / "out" / "workload.jsonl").of("amptune", 40.0)
    assert "failure" not in line
    assert any(entry["what"] == "TrialEnded" for entry in line["course"])


# --- the table -----------------------------------------------------------------------------------------------------


def evidence_of(path: Path, budget_s: float, times: Sequence[dict[str, float]]) -> foreign_table.Evidence:
    """A model's file with a launch for each of the times."""
    told = {"what": "amptune", "budget_s": budget_s, "seconds": 100.0, "course": [], "policy": policy_to_dict(BF16)}
    oracle.append(path, told)
    for launch, ms in enumerate(times):
        for name, value in ms.items():
            row = launch_row([name], value)
            if math.isinf(value):
                row |= {"failure": "it crashed", "ms": []}
            oracle.append(path, {"what": "launch", "budget_s": budget_s, "launch": launch, **row})
    return foreign_table.Evidence(path)


def test_a_model_misses_a_figure_only_with_its_whole_interval(tmp_path: Path) -> None:
    figure = foreign_table.Figure(budget_s=120.0, over="pytorch-autotune", each=0.97, mean=1.15)
    slow = [{"amptune": 1.1 + 0.001 * i, "pytorch-autotune": 1.0, "its own step": 2.0} for i in range(3)]
    wide = [{"amptune": ms, "pytorch-autotune": 1.0} for ms in (0.9, 1.1, 1.3)]
    evidences = [
        evidence_of(tmp_path / "swin_t.jsonl", 120.0, slow),
        evidence_of(tmp_path / "r3d_18.jsonl", 120.0, wide),
    ]
    told = foreign_table.verdict(figure, evidences)
    assert "missed: swin_t 0.908 [0.906, 0.910];" in told
    assert "r3d_18" not in told
    assert "2 of 8" in told
    assert "geometric mean ≥ 1.150: missed" in told


def test_the_faster_of_two_figures_counts_for_the_other_tuner(tmp_path: Path) -> None:
    times = [{"amptune": 1.0, "pytorch-autotune": 2.0, "its own step": 1.5}] * 3
    ratio = foreign_table.speed_over(evidence_of(tmp_path / "swin_t.jsonl", 120.0, times), 120.0, "pytorch-autotune")
    assert ratio is not None
    assert ratio.value == pytest.approx(1.5)


def test_a_policy_that_failed_in_one_launch_is_no_answer(tmp_path: Path) -> None:
    times = [{"stock": 2.0, "amptune": 1.0}, {"stock": 2.0, "amptune": math.inf}]
    evidence = evidence_of(tmp_path / "swin_t.jsonl", 60.0, times)
    assert foreign_table.speed_over(evidence, 60.0, "stock") is None
    assert "missed: swin_t without an answer" in foreign_table.verdict(foreign_table.FIGURES[0], [evidence])


def test_one_launch_has_no_interval_and_misses_nothing(tmp_path: Path) -> None:
    evidence = evidence_of(tmp_path / "swin_t.jsonl", 60.0, [{"stock": 1.0, "amptune": 2.0}])
    assert foreign_table.verdict(foreign_table.FIGURES[0], [evidence]).endswith("each ≥ 1.000: met")


def test_the_table_has_a_row_for_each_model_and_a_line_for_each_figure(tmp_path: Path) -> None:
    times = [{"stock": 4.0, "amp bf16": 2.0, "amptune": 1.0}] * 2
    text = foreign_table.table([evidence_of(tmp_path / "swin_t.jsonl", 60.0, times)])
    assert "| swin_t | 4.000 | 2.000 | - | - | - | - | 1.000 | 4.000 [4.000, 4.000] | 2.000 [2.000, 2.000] |" in text
    assert "| **geometric mean** |" in text
    assert text.count("\n- ") >= len(foreign_table.FIGURES) - 1
