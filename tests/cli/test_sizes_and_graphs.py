"""`amptune tune` with batch sizes, a limit of memory and torch.compile, on a recorded machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import Machine, run
from in_this_process import measuring_here
from simulated.recorded import recorded_ms

from amptune.measure.results.subject import Prepared
from amptune.policy.settings import Policy

BASE = ["tune", "train.py:small", "--budget", "200s"]


class Limited(Machine):
    """A machine with 20 GiB, on which a step has a fixed part: a larger batch is faster a sample."""

    def prepare(self, limit_s: float) -> Prepared:
        self.true_ms = saturating
        return replace(super().prepare(limit_s), memory_mib=20 * 1024.0)


def saturating(policy: Policy) -> float:
    return recorded_ms("resnet50", policy) * (0.5 + 0.5 * (policy.batch_size or 128) / 128)


@pytest.mark.slow
def test_the_batch_size_is_searched_within_memory_when_it_is_asked_for(folder: Path) -> None:
    done = run(*BASE, "--batch-size", "auto", "--json", folder=folder, evaluator=Limited())
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    largest = next(finding for finding in answer["findings"] if finding["code"] == "largest-batch")
    assert largest["limit_mib"] == 20 * 1024
    assert 128 < answer["policy"]["batch_size"] <= largest["batch_size"]
    assert "batch size 256" in done.stderr


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
