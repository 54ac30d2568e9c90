"""Commands in processes of their own, with real workers, as a user runs them: what no recording can show.

Budgets are as long as it takes to import torch so many times on the machine at hand: a slow one has time for the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import WORKLOADS, budget_here, process, run, start, wait_for_trials

from amptune.policy.file_io import save
from amptune.policy.settings import Policy

# On a slow machine budgets are long; what would wait for ever ends here.
pytestmark = pytest.mark.timeout(1200)

TRAINING = """
import amptune
from train import small

model = small.model()
with amptune.apply("policy.yaml", model) as tuned:
    optimizer = tuned.optimizer(small.optimizer(model))
    with tuned.autocast():
        loss = small.loss(tuned.model, tuned.batch(small.batch(tuned.batch_size)))
    tuned.scaler.scale(loss).backward()
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
"""

# The same policy in another script, whose loop counts what its compiler found.
COMPILED_TRAINING = (
    TRAINING.replace('("policy.yaml", model)', '("policy.yaml", model, artifacts=True)')
    + """
from torch._dynamo.utils import counters
assert (counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]) == (2, 1), counters
assert not counters["inductor"]["fxgraph_cache_miss"], counters
"""
)


def test_tuning_writes_a_policy_that_trains(folder: Path) -> None:
    done = process("tune", "train.py:small", "--budget", budget_here(8), "--trials", "2", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "policy written to policy.yaml" in done.stdout
    assert "the script prints" not in done.stdout + done.stderr
    assert "the script prints" in next((folder / ".amptune").rglob("workers.log")).read_text()
    subprocess.run([sys.executable, "-W", "error", "-c", TRAINING], cwd=folder, check=True)


@pytest.mark.parametrize("arguments", [("frobnicate",), ("check", "missing.yaml", "--json"), ("schema", "policy")])
def test_a_process_prints_and_returns_what_the_same_command_does_in_this_process(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    here, there = run(*arguments, folder=folder), process(*arguments, folder=folder)
    assert there.stderr.replace("python -m amptune", "amptune") == here.stderr
    assert (there.returncode, there.stdout) == (here.returncode, here.stdout)


@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interruption_writes_the_best_so_far(folder: Path, stop: signal.Signals) -> None:
    with start("tune", "train.py:small", folder=folder) as running:
        wait_for_trials(running, 1)
        running.send_signal(stop)
        stdout, stderr = running.communicate()
    assert running.returncode == 130, stderr
    assert "provisional policy written to policy.yaml" in stdout
    assert "provisional: true" in (folder / "policy.yaml").read_text()


@pytest.mark.slow
def test_a_second_interruption_does_not_lose_the_answer(folder: Path) -> None:
    with start("tune", "train.py:small", folder=folder) as running:
        wait_for_trials(running, 1)
        running.send_signal(signal.SIGINT)
        time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        running.communicate()
    assert running.returncode == 130
    assert "provisional: true" in (folder / "policy.yaml").read_text()


@pytest.mark.slow
def test_killing_the_tuner_leaves_no_worker_behind(folder: Path) -> None:
    with start("tune", "train.py:small", folder=folder) as running:
        wait_for_trials(running, 1)
        workers = psutil.Process(running.pid).children(recursive=True)
        assert workers
        running.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


@pytest.mark.slow
def test_a_script_that_changes_the_folder_is_found_by_every_worker(folder: Path) -> None:
    (folder / "moves.py").write_text("import os; os.chdir('/')\n" + WORKLOADS)
    done = process("tune", "moves.py:small", "--budget", budget_here(10), "--trials", "2", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policy"]["batch_size"] == 16


@pytest.mark.slow
def test_a_script_without_a_main_guard_tunes_once(folder: Path) -> None:
    script = folder / "tunes.py"
    script.write_text(
        WORKLOADS + "\nimport amptune\nprint('tuning')\n"
        f"decision = amptune.tune(small, budget_s={budget_here(10).removesuffix('s')}, trials=2)\n"
        "print('batch size', decision.policy.batch_size)\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tuning") == 1
    assert "batch size 16" in done.stdout


@pytest.mark.slow
def test_training_with_an_empty_cache_finds_what_the_tuning_compiled(folder: Path) -> None:
    save(Policy(compile="default"), folder / "today.yaml")
    options = ["--baseline", "today.yaml", "--set", "compile=default", "--trials", "1", "--json"]
    cache = str(folder / "graphs")
    done = process(
        "tune", "train.py:small", "--budget", budget_here(40), *options, folder=folder, TORCHINDUCTOR_CACHE_DIR=cache
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["artifacts"] == "policy.yaml.artifacts"
    subprocess.run(
        [sys.executable, "-c", COMPILED_TRAINING],
        cwd=folder,
        check=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "empty")},
    )
