"""`amptune tune --workers`: several processes on one study, as a user runs them; and what is refused before."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import Machine, budget_here, process, run, start

from amptune.cli.workers import Part, parts_of
from amptune.measure.workers.cpu_share import cores, cores_for
from amptune.search.sampler.storage import recall

# On a slow machine budgets are long; what would wait for ever ends here.
pytestmark = pytest.mark.timeout(1200)
needs_cores = pytest.mark.skipif(sys.platform != "linux" or cores() < 2, reason="needs Linux and two CPU cores")

BOTH = ("tune", "train.py:large", "--device", "cpu", "--workers", "2", "--no-compile")


def wait_for_a_trial_of_each(running: subprocess.Popen[str]) -> None:
    assert running.stderr is not None
    waiting = {"", "worker 2: "}
    for line in iter(running.stderr.readline, ""):
        waiting -= set(re.findall(r"^(worker 2: |)\[.* s left\] +\d+ ", line))
        if not waiting:
            return
    pytest.fail("tuning ended before each worker had a trial")


@needs_cores
def test_two_workers_measure_for_one_study_and_one_answer(folder: Path) -> None:
    done = process(*BOTH, "--study", "study", "--trials", "7", "--json", "--budget", budget_here(20), folder=folder)
    assert done.returncode == 0, done.stderr
    shared = next(one for one in json.loads(done.stdout)["findings"] if one["code"] == "shared-cpu")
    assert shared["message"].startswith("2 workers shared this CPU")
    assert (folder / "policy.yaml").is_file()
    assert "worker 2: [" in done.stderr
    record = recall(folder / "study")
    other, own = record.tunings
    of_run = {one.run: [trial for trial in record.trials if trial.run == one.run] for one in (other, own)}
    assert 1 <= len(of_run[other.run]) <= 3
    assert 1 <= len(of_run[own.run]) <= 4
    measured = [trial.policy for trial in record.trials if trial.policy != own.baseline]
    assert len(measured) == len(set(measured))
    assert record.findings  # of the run that decided
    baselines = {row.run for row in record.table if row.policy == own.baseline}
    assert baselines == {own.run, other.run}


@pytest.mark.slow
@needs_cores
@pytest.mark.parametrize("ends", ["another is killed", "interrupted", "the first is killed"])
def test_the_others_go_on_without_a_worker_and_end_with_the_first(ends: str, folder: Path) -> None:
    with start(*BOTH, "--budget", budget_here(16), folder=folder) as running:
        wait_for_a_trial_of_each(running)
        processes = psutil.Process(running.pid).children(recursive=True)
        other = next(one for one in processes if "--worker" in one.cmdline())
        if ends == "another is killed":
            other.kill()
        elif ends == "interrupted":  # as Ctrl-C at a terminal does
            other.send_signal(signal.SIGINT)
            running.send_signal(signal.SIGINT)
        else:
            running.kill()
        stdout, stderr = running.communicate()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    if ends == "another is killed":
        assert (running.returncode, "policy written to policy.yaml" in stdout) == (0, True), stderr
        assert "\nworker 2 was ended by SIGKILL; the others go on" in f"\n{stderr}"
    if ends == "interrupted":
        assert (running.returncode, "provisional policy written to policy.yaml" in stdout) == (130, True), stderr


@pytest.mark.parametrize(
    ("options", "gpus", "said"),
    [
        (("--workers", "3"), 2, "--workers 3 needs a GPU for each: CUDA's driver has 2; choose fewer"),
        (
            ("--workers", "2"),
            0,
            "has none, or cannot be loaded; choose fewer, or share the CPU's cores with --device cpu",
        ),
        (("--workers", "2", "--device", "cuda:1"), 2, "and --device cuda:1 names one: leave it out"),
        (("--workers", "100000", "--device", "cpu"), 2, "--workers 100000 needs a CPU core for each"),
        (("--workers", "2", "--trials", "1"), 2, "2 workers need at least as many --trials"),
    ],
)
def test_workers_without_a_device_or_a_trial_are_refused_before_anything_starts(
    options: tuple[str, ...], gpus: int, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amptune.cli.device.gpu_count", lambda: gpus)
    done = run("tune", "train.py:small", *options, folder=folder, evaluator=Machine())
    assert done.returncode == 2
    assert said in done.stderr
    assert not (folder / ".amptune").exists()


def test_each_worker_has_a_gpu_a_share_of_the_cores_and_of_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amptune.cli.device.gpu_count", lambda: 2)
    monkeypatch.setattr("amptune.measure.workers.cpu_share.cores_for", lambda _: [(0, 1), (2, 3)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one, other = Part(gpu="0", cores=(0, 1), trials=3), Part(gpu="1", cores=(2, 3), trials=2)
    assert parts_of(2, None, 5) == [one, other]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [part.gpu for part in parts_of(2, "cuda", None)] == ["3", "5"]
    assert parts_of(1, "cuda:1", None) == [Part()]


@pytest.mark.skipif(sys.platform != "linux", reason="cores are shared out on Linux")
def test_threads_of_one_core_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amptune.measure.workers.cpu_share.cores_of_this_process", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("amptune.measure.workers.cpu_share._first_of_core", lambda cpu: (cpu % 2, cpu))
    assert cores_for(2) == [(0, 2), (1, 3)]
    assert cores_for(5) == [()] * 5
