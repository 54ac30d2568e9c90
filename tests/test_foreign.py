"""The program that tunes models outside the zoo: its plain loop, how it goes on, and what its table says."""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from simulated.clock import SimulatedClock

sys.path.append(str(Path(__file__).parent.parent / "reports"))  # programs, no package

import foreign
import foreign_models
import foreign_parts
import foreign_table
import lanes
import plain_loop
import unruly_models
import unruly_table
from json_lines import append
from measurements import took

import amptune
from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe
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


@pytest.mark.parametrize("model", foreign_table.UNRULY)
def test_every_unruly_model_trains(model: str) -> None:
    if model in ("layers_dropped", "changing_lengths"):
        pytest.importorskip("transformers", reason="transformers builds this model")
    assert foreign.target_of(model).endswith(f"unruly_models.py:{model}")
    workload = getattr(unruly_models, model)(tiny=True)
    assert workload.name == model
    step = plain_loop.step_under(amp_recipe("bf16"), workload, "cpu")
    losses = [step().item(), step().item()]
    assert all(map(math.isfinite, losses))
    assert losses[0] != losses[1]


# --- the plain loop ------------------------------------------------------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.slow
def test_blocks_of_given_steps_count_them_all_and_a_slow_one_ends_before(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"target": target, "policy": policy_to_dict(STOCK), "config": None, "steps": 12}
    loop = plain_loop.Loop(told, "cpu")
    taken: list[int] = []

    def seconds(steps: int) -> float:
        taken.append(steps)
        return 0.5 * steps

    monkeypatch.setattr(loop, "_seconds", seconds)
    loop._loss = torch.ones(())
    assert loop.block() == {"ms": 500.0, "steps": 12, "loss": 1.0}
    assert sum(taken) == 12
    monkeypatch.setattr(plain_loop, "LONGEST_BLOCK_S", 2.0)
    assert loop.block()["steps"] == plain_loop.FEWEST_STEPS
    taken.clear()
    loop.warm_up()
    assert taken == [plain_loop.FIRST_STEPS], "a fast arm's block begins at the same step as a slow one's"
    arms = [plain_loop.Arm(names=("stock",), policy=STOCK, caches=tmp_path / "caches")]
    (row,) = plain_loop.in_turn(arms, target, "cpu", Budget(seconds=300), steps=7)
    assert row["steps"] == [7] * plain_loop.LONG_BLOCKS
    assert len(row["ms"]) == plain_loop.LONG_BLOCKS


def test_what_torch_compiles_stands_in_the_given_folder_and_the_environment_is_put_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with plain_loop.compile_caches(tmp_path / "caches") as folder:
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == folder
        assert Path(os.environ["TRITON_CACHE_DIR"]).parent == folder
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_what_the_limit_cuts_short_is_no_row(target: str, tmp_path: Path) -> None:
    arms = [plain_loop.Arm(names=("stock",), policy=STOCK, caches=tmp_path / "caches")]
    with pytest.raises(plain_loop.LimitReachedError):
        plain_loop.in_turn(arms, target, "cpu", Budget(seconds=0))


def test_the_other_tuner_is_searched_and_its_step_built_again(target: str, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_autotune", reason="pytorch-autotune is not installed")
    evidence = foreign_table.Evidence(tmp_path / "workload.jsonl")
    work = foreign_parts.Work(
        evidence=evidence,
        target=target,
        budget_s=30.0,
        plan=foreign_table.PLANS["foreign"],
        limit=Budget(seconds=300),
        device="cpu",
        launches=1,
        caches=tmp_path / "caches",
        course=False,
    )
    assert foreign_parts.do(work, "pytorch-autotune")
    (found,) = evidence.of("pytorch-autotune")
    assert found["failure"] is None
    assert found["fuses"]
    assert found["report"]["trials"][0]["at_s"] > 0
    (arm,) = (arm for arm in foreign_parts.arms_of(work) if arm.names == ("its own step",))
    (row,) = work.in_turn([arm])
    assert row["failure"] is None
    assert len(row["ms"]) == plain_loop.BLOCKS


# --- going on ------------------------------------------------------------------------------------------------------


class LaneHere:
    """Does its jobs in this process, at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._code = 0

    def begin(self, job: lanes.Job, limit_s: float) -> None:
        self._monkeypatch.setattr(sys, "argv", [*job.command[1:], "--limit", str(limit_s)])
        self._code = foreign.main()

    def ended(self) -> int:
        return self._code

    def end(self) -> None:
        raise AssertionError("its jobs have ended")


class Doubles:
    """Stand for tuners and launches; count what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tunings: list[float] = []
        self.launches: list[list[str]] = []
        self.steps: list[int | None] = []
        monkeypatch.setattr(amptune, "tune", self.tune)
        monkeypatch.setattr(foreign_parts, "answer_of", self.answer_of)
        monkeypatch.setattr(foreign_parts, "in_turn", self.in_turn)
        monkeypatch.setattr(foreign, "lanes_of", lambda count, **_: [LaneHere(monkeypatch) for _ in range(count)])
        monkeypatch.setattr(lanes, "POLL_S", 0.0)
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

    def in_turn(
        self, arms: Sequence[plain_loop.Arm], *_: Any, steps: int | None, **__: Any
    ) -> list[foreign_table.Line]:
        self.steps.append(steps)
        self.launches.append([name for arm in arms for name in arm.names])
        return [
            launch_row(arm.names, 1.0 if "amptune" in arm.names else 2.0, arm.policy and policy_to_dict(arm.policy))
            for arm in arms
        ]


def launch_row(names: Sequence[str], ms: float, policy: Any = None) -> foreign_table.Line:
    return {"names": list(names), "policy": policy, "failure": None, "ms": [ms, ms], "launch_s": 10.0}


def long_row(names: Sequence[str], ms: Sequence[float], policy: Any = None) -> foreign_table.Line:
    return {**launch_row(names, 1.0, policy), "ms": list(ms), "block_steps": 50, "steps": [50] * len(ms)}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["foreign.py", *arguments])
    assert foreign.main() == 0


def test_a_command_does_only_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doubles = Doubles(monkeypatch)
    command = ["swin_t", "--out", str(tmp_path), "--caches", str(tmp_path / "caches")]
    run(monkeypatch, *command)
    assert doubles.tunings == [-120.0, 120.0, 60.0, 300.0]  # the other tuner's 70 s serve 300 s too
    assert len(foreign_table.Evidence(tmp_path / "swin_t.jsonl").of("grid")) == 18 + foreign_table.FASTEST
    assert doubles.launches[0] == ["stock", "pytorch-autotune", "amp bf16", "amp fp16", "amptune", "its own step"]
    assert len(foreign_table.Evidence(tmp_path / "swin_t.jsonl").of("launch", 60.0)) == 4
    assert {"grid 1", "grid 2", "grid 3"} <= set(doubles.launches[-1])
    before = (tmp_path / "swin_t.jsonl").read_text()
    run(monkeypatch, *command)
    assert (tmp_path / "swin_t.jsonl").read_text() == before
    run(monkeypatch, *command, "--launches", "4", "--budget", "60")
    assert doubles.tunings == [-120.0, 120.0, 60.0, 300.0]
    assert len({line["launch"] for line in foreign_table.Evidence(tmp_path / "swin_t.jsonl").of("launch", 60.0)}) == 4


def test_nothing_is_begun_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doubles = Doubles(monkeypatch)
    run(monkeypatch, "swin_t", "--out", str(tmp_path), "--caches", str(tmp_path / "caches"), "--limit", "130")
    assert doubles.tunings == [60.0]  # 120 s do not fit, 60 s do
    assert len(doubles.launches) == 1


def test_an_unruly_model_is_tuned_three_times_before_its_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    doubles = Doubles(monkeypatch)
    command = ["early_exit", "--plan", "unruly", "--out", str(tmp_path), "--caches", str(tmp_path / "caches")]
    run(monkeypatch, *command, "--lanes", "2", "--budget", "60")
    assert doubles.tunings == [60.0] * 3
    assert doubles.launches == [["stock", "amp bf16", "amp fp16", "amptune", "amptune 2", "amptune 3"]]
    assert doubles.steps == [50]


def test_a_policy_of_the_zoo_is_held_to_the_one_in_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doubles = Doubles(monkeypatch)
    run(monkeypatch, "resnet18", "--plan", "zoo", "--out", str(tmp_path), "--caches", str(tmp_path / "caches"))
    assert doubles.tunings == [120.0]
    assert "reports" in doubles.launches[0]


def test_the_course_is_trained_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doubles = Doubles(monkeypatch)
    run(monkeypatch, "r3d_18", "--budget", "120", "--out", str(tmp_path), "--caches", str(tmp_path / "c"), "--course")
    assert [name for names in doubles.launches for name in names].count("course") == 2
    evidence = foreign_table.Evidence(tmp_path / "r3d_18.jsonl")
    told = [(who, at_s >= 0, policy) for who, at_s, policy in foreign_parts.best_so_far(evidence, 120.0)]
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


# --- lanes ---------------------------------------------------------------------------------------------------------


class SlowLane:
    """A lane whose jobs take as long as is expected of them, on a clock that `lanes` moves on by sleeping."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._ends_s = 0.0
        self.told: list[tuple[float, str]] = []
        self.was_ended = False

    def begin(self, job: lanes.Job, limit_s: float) -> None:
        assert limit_s > 0
        self.told.append((self._clock(), job.name))
        self._ends_s = self._clock() + float(job.command[0])

    def ended(self) -> int | None:
        return 0 if self._clock() >= self._ends_s else None

    def end(self) -> None:
        self.was_ended = True


def run_lanes(
    monkeypatch: pytest.MonkeyPatch, count: int, jobs: Sequence[lanes.Job], limit_s: float
) -> tuple[list[SlowLane], list[lanes.Job]]:
    clock = SimulatedClock()
    monkeypatch.setattr(time, "sleep", clock.advance)
    queue = list(jobs)

    def next_job(running: Sequence[lanes.Job], failed: Sequence[lanes.Job], left_s: float) -> lanes.Job | None:  # noqa: ARG001
        fitting = [job for job in queue if job.expected_s <= left_s]
        return queue.pop(queue.index(fitting[0])) if fitting else None

    slow = [SlowLane(clock) for _ in range(count)]
    return slow, lanes.run(slow, next_job, Budget(seconds=limit_s, started=clock(), clock=clock))


def job(name: str, expected_s: float, takes_s: float | None = None) -> lanes.Job:
    return lanes.Job(name=name, command=(str(takes_s or expected_s),), expected_s=expected_s)


def test_a_free_lane_takes_the_next_job_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job("a", 300), job("b", 100), job("c", 150), job("d", 300), job("e", 90)]
    (first, second), failed = run_lanes(monkeypatch, 2, jobs, 400)
    assert not failed
    assert [name for _, name in first.told] == ["a"]
    assert [name for _, name in second.told] == ["b", "c", "e"]  # d would not end in time
    assert not first.was_ended


def test_a_job_that_takes_too_long_is_ended_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    (lane,), failed = run_lanes(monkeypatch, 1, [job("a", 100, 1000)], 200)
    assert [one.name for one in failed] == ["a"]
    assert lane.was_ended


def test_a_lane_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        f"sys.path.append({str(Path(lanes.__file__).parent)!r})\n"
        "from lanes import end_with_parent\n"
        "end_with_parent()\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "cores = len(os.sched_getaffinity(0))\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "path.with_suffix('.new').write_text(f'{child.pid} {cores} {os.environ.get(\"CUDA_VISIBLE_DEVICES\")}')\n"
        "path.with_suffix('.new').rename(path)\n"
        "time.sleep(1000)\n"
    )
    lane = lanes.ProcessLane(gpu="1", cores=frozenset(list(os.sched_getaffinity(0))[:1]))
    told = tmp_path / "told"
    lane.begin(lanes.Job(name="a", command=(sys.executable, str(program), str(told)), expected_s=1.0), 100.0)
    while not told.exists():
        assert lane.ended() is None
        time.sleep(0.05)
    child, cores, gpu = told.read_text().split()
    assert (cores, gpu) == ("1", "1")
    lane.end()
    assert lane.ended() == 1
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE


def test_lanes_share_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(lanes, "_first_sibling", lambda cpu: cpu % 4)  # 0 and 4 are threads of one core
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [lane.cores for lane in lanes.lanes_of(2, gpus=True)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert [lane.gpu for lane in lanes.lanes_of(2, gpus=True)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [lane.gpu for lane in lanes.lanes_of(2, gpus=True)] == ["3", "5"]
    assert [lane.gpu for lane in lanes.lanes_of(2, gpus=False)] == [None, None]
    assert [(lane.gpu, len(lane.cores)) for lane in lanes.lanes_of(1, gpus=True)] == [(None, 8)]


def test_what_another_process_added_is_read(tmp_path: Path) -> None:
    path = tmp_path / "swin_t.jsonl"
    one, other = foreign_table.Evidence(path), foreign_table.Evidence(path)
    one.add("launch", {"launch": 0})
    assert len(other.of("launch")) == 1
    with path.open("a") as file:
        file.write('{"what": "lau')  # a process that was killed
    other.add("launch", {"launch": 1})
    assert [line["launch"] for line in one.of("launch")] == [0, 1]


# --- the table -----------------------------------------------------------------------------------------------------


def evidence_of(path: Path, budget_s: float, times: Sequence[dict[str, float]]) -> foreign_table.Evidence:
    """A model's file with a launch for each of the times."""
    told = {"what": "amptune", "budget_s": budget_s, "seconds": 100.0, "course": [], "policy": policy_to_dict(BF16)}
    append(path, told)
    for launch, ms in enumerate(times):
        for name, value in ms.items():
            row = launch_row([name], value)
            if math.isinf(value):
                row |= {"failure": "it crashed", "ms": []}
            append(path, {"what": "launch", "budget_s": budget_s, "launch": launch, **row})
    return foreign_table.Evidence(path)


def test_a_model_misses_a_figure_only_with_its_whole_interval(tmp_path: Path) -> None:
    figure = foreign_table.Figure(budget_s=120.0, over="pytorch-autotune", each=0.97, mean=1.2)
    slow = [{"amptune": 1.1 + 0.001 * i, "pytorch-autotune": 1.0, "its own step": 2.0} for i in range(3)]
    wide = [{"amptune": ms, "pytorch-autotune": 1.0} for ms in (0.9, 1.1, 1.3)]
    evidences = [
        evidence_of(tmp_path / "swin_t.jsonl", 120.0, slow),
        evidence_of(tmp_path / "r3d_18.jsonl", 120.0, wide),
    ]
    told = foreign_table.verdict(figure, evidences)
    assert "missed: swin_t 0.908 [0.906, 0.910]; undecided: r3d_18 0.909" in told
    assert "2 of 8" in told
    assert "geometric mean ≥ 1.200: missed" in told


def test_the_median_of_three_launches_is_the_speed(tmp_path: Path) -> None:
    times = [{"stock": 2.0, "amptune": ms} for ms in (1.0, 1.0, 4.0)]
    ratio = foreign_table.speed_over(evidence_of(tmp_path / "swin_t.jsonl", 60.0, times), 60.0, "stock")
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)


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
    slower = evidence_of(tmp_path / "swin_t.jsonl", 60.0, [{"stock": 1.0, "amptune": 2.0}])
    faster = evidence_of(tmp_path / "r3d_18.jsonl", 60.0, [{"stock": 2.0, "amptune": 1.0}])
    figure = foreign_table.FIGURES[0]
    assert foreign_table.verdict(figure, [slower, faster]).endswith("each ≥ 1.000: undecided: swin_t 0.500")
    assert foreign_table.verdict(figure, [faster]).endswith("each ≥ 1.000: met")


def test_the_table_has_a_row_for_each_model_and_a_line_for_each_figure(tmp_path: Path) -> None:
    times = [{"stock": 4.0, "amp bf16": 2.0, "amptune": 1.0}] * 2
    text = foreign_table.table([evidence_of(tmp_path / "swin_t.jsonl", 60.0, times)])
    assert "| swin_t | 4.000 | 2.000 | - | - | - | - | 1.000 | 4.000 [4.000, 4.000] | 2.000 [2.000, 2.000] |" in text
    assert "| **geometric mean** |" in text
    assert text.count("\n- ") >= len(foreign_table.FIGURES) - 1


def test_a_policy_slower_than_stock_and_one_that_fails_are_named(tmp_path: Path) -> None:
    path = tmp_path / "early_exit.jsonl"
    told = {"what": "amptune", "budget_s": 60.0, "seconds": 62.0, "course": [], "policy": policy_to_dict(BF16)}
    for tuning in range(4):
        append(path, {**told, "tuning": tuning})
    rows = [
        long_row(["stock", "amptune 4"], [10.0, 10.0]),
        long_row(["amptune"], [9.0, 9.0]),
        long_row(["amptune 2"], [10.0, 10.5]),  # the median block is as fast as stock's, the mean is not
        {**long_row(["amptune 3"], []), "failure": "it crashed"},
    ]
    for row in rows:
        append(path, {"what": "launch", "budget_s": 60.0, "launch": 0, **row})
    evidence = foreign_table.Evidence(path)
    assert unruly_table.is_unruly(evidence)
    *_, count, slower, failed, without = unruly_table.unruly_table([evidence]).splitlines()
    assert count == "- 4 tunings of 1 models, of which 3 can be compared"
    assert slower.startswith("- slower than stock by more than 2%: early_exit, 60 s, amptune 2 0.976 [")
    assert "amptune 3" not in slower
    assert failed == "- failed in the plain loop: early_exit, 60 s, amptune 3"
    assert without.endswith("none")


README = (Path(__file__).parent.parent / "README.md").read_text()
FOREIGN = Path(__file__).parent.parent / "reports" / "h100" / "foreign"
IN_README = {
    "ConvNeXt-T": "convnext_tiny", "EfficientNetV2-S": "efficientnet_v2_s", "RegNetY-3.2GF": "regnet_y_3_2gf",
    "ViT-S/16": "vit_small_patch16_224", "Swin-T": "swin_t", "T5-base": "t5_base", "R3D-18": "r3d_18",
    "Llama 150M": "llama_150m",
}  # fmt: skip


def test_the_readmes_table_has_the_step_times_of_models_that_amptune_was_not_developed_with() -> None:
    ratios: dict[str, list[float]] = {"recipe": [], "pytorch-autotune": []}
    for name, model in IN_README.items():
        evidence = foreign_table.Evidence(FOREIGN / f"{model}.jsonl")
        (row,) = [line for line in README.splitlines() if line.startswith(f"| {name},")]
        shown = [float(cell.strip(" *")) for cell in row.split("|")[2:6]]
        times = {
            arm: statistics.geometric_mean(ms.values()) for arm, ms in foreign_table.times_of(evidence, 120.0).items()
        }
        measured = [
            times["stock"],
            min(times["amp bf16"], times["amp fp16"]),
            min(times["pytorch-autotune"], times["its own step"]),
            times["amptune"],
        ]
        assert shown == [float(f"{ms:.3g}") for ms in measured]
        for over, found in ratios.items():
            ratio = foreign_table.speed_over(evidence, 120.0, over)
            assert ratio is not None
            found.append(ratio.value)
    recipe, autotune = (f"{statistics.geometric_mean(found):.1f} times" for found in ratios.values())
    said = f"amptune is {recipe} as fast as the AMP recipe and {autotune} as fast as pytorch-autotune"
    assert said in " ".join(README.split())
