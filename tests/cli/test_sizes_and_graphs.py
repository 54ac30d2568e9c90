"""`amptune tune` with batch sizes, a limit of memory and torch.compile, on a recorded machine."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from commands import Machine, run
from in_this_process import measuring_here

BASE = ["tune", "train.py:small", "--budget", "200s"]


def test_a_global_batch_is_kept_and_the_policy_says_so(folder: Path) -> None:
    options = ["--global-batch", "128", "--devices", "2", "--trials", "2"]
    done = run(*BASE, *options, folder=folder, evaluator=Machine(batch_size=16))
    assert done.returncode == 0, done.stderr
    policy = yaml.safe_load((folder / "policy.yaml").read_text())
    assert policy["batch_size"] * policy["accumulate"] * 2 == 128
    assert "the global batch stays 128: 16 × accumulate 4 × 2 devices" in done.stderr


def test_a_baseline_that_takes_more_memory_than_is_allowed_is_said_clearly(folder: Path) -> None:
    with measuring_here(f"{folder}/train.py:small", memory_mib=10.0) as here:
        done = run(*BASE, "--max-memory", "10MiB", folder=folder, evaluator=here)
    assert done.returncode == 3
    assert "above the 10 MiB allowed" in done.stderr


def test_nothing_is_compiled_against_the_users_will(folder: Path) -> None:
    without = Machine()
    done = run(*BASE, "--no-compile", "--json", folder=folder, evaluator=without)
    assert all(policy.compile == "off" for policy in without.measured)
    codes = {finding["code"] for finding in json.loads(done.stdout)["findings"]}
    assert not {code for code in codes if code.startswith("compile")}
