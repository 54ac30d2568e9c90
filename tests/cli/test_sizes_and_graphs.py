"""`amptune tune` with batch sizes, a limit of memory and torch.compile, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from test_commands import WORKLOADS, run

BASE = ["tune", "train.py:small"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(WORKLOADS)
    return tmp_path


def test_the_batch_size_is_searched_within_memory_when_it_is_asked_for(folder: Path) -> None:
    options = ["--batch-size", "auto", "--max-memory", "2GiB", "--trials", "12"]
    done = run(*BASE, "--budget", "25s", *options, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    largest = next(finding for finding in answer["findings"] if finding["code"] == "largest-batch")
    assert largest["limit_mib"] == 2048
    assert answer["policy"]["batch_size"] <= 16 * 16
    assert "batch size 256" in done.stderr


def test_a_global_batch_is_kept_and_the_policy_says_so(folder: Path) -> None:
    options = ["--global-batch", "128", "--devices", "2", "--trials", "2"]
    done = run(*BASE, "--budget", "15s", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    policy = yaml.safe_load((folder / "policy.yaml").read_text())
    assert policy["batch_size"] * policy["accumulate"] * 2 == 128
    assert "the global batch stays 128: 16 × accumulate 4 × 2 devices" in done.stdout


def test_all_is_done_with_the_batch_that_is_named_where_the_workloads_own_does_not_fit(folder: Path) -> None:
    command = ["tune", "train.py:too_large", "--budget", "20s", "--trials", "3"]
    done = run(*command, folder=folder)
    assert done.returncode == 3
    assert "name a smaller batch with --batch-size" in done.stderr
    done = run(*command, "--batch-size", "32", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "small: 18,696 parameters, batch 32" in done.stderr
    assert "numerics of bf16: as good as FP32" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["policy"]["batch_size"] == 32
    assert "not-judged" not in {finding["code"] for finding in answer["findings"]}


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--global-batch", "100"], 2, "name one that does with --batch-size: 5, 10, 20"),
        (["--global-batch", "101", "--devices", "2"], 2, "cannot be shared out evenly among 2 devices"),
        (["--devices", "2"], 2, "together with --global-batch"),
        (["--max-memory", "60"], 2, "write 60GiB"),
        (["--max-memory", "10MiB"], 3, "above the 10 MiB allowed"),
        (["--set", "batch_size=4"], 2, "use --batch-size"),
    ],
)
def test_what_cannot_be_is_said_clearly(folder: Path, options: list[str], code: int, words: str) -> None:
    done = run(*BASE, "--budget", "15s", *options, folder=folder)
    assert done.returncode == code, done.stderr
    assert words in done.stderr


def test_a_compiled_policy_is_measured_compared_and_applied(folder: Path) -> None:
    options = ["--set", "compile=default", "--set", "autocast=off", "--trials", "5", "--json"]
    cache = str(folder / "graphs")
    done = run(*BASE, "--budget", "50s", *options, folder=folder, TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    finalists = answer["evidence"]["finalists"]
    compiled = [one for one in finalists if one["policy"].get("compile") == "default"]
    assert compiled
    assert all("step_ms" in one for one in compiled)
    codes = {finding["code"] for finding in answer["findings"]}
    assert codes & {"compile-pays", "compile-costs", "compile-not-needed"}


def test_nothing_is_compiled_against_the_users_will(folder: Path) -> None:
    done = run(*BASE, "--budget", "12s", "--no-compile", "--trials", "2", "--json", folder=folder)
    codes = {finding["code"] for finding in json.loads(done.stdout)["findings"]}
    assert not {code for code in codes if code.startswith("compile")}
