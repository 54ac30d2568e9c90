"""`--devices`, and torchrun before amptune: steps over several processes, and what is refused before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import Done, Machine, budget_here, process, run

from amptune.cli.device import require_ranks
from amptune.cli.torchrun import Torchrun, take_over
from amptune.errors import DeviceError
from amptune.search.request import ranks_of

pytestmark = pytest.mark.timeout(1200)

# What torchrun gives the first of two processes on this node.
FIRST = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SMALL = ("tune", "train.py:small", "--device", "cpu", "--no-compile")


def torchrun(*arguments: str, folder: Path) -> Done:
    """Runs a command under torchrun, in two processes."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "amptune"]
    done = subprocess.run([*line, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return Done(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


@pytest.mark.slow
def test_under_torchrun_steps_are_timed_over_its_processes_and_verified_so(folder: Path) -> None:
    done = torchrun(*SMALL, "--trials", "4", "--budget", budget_here(8), folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("policy written to policy.yaml") == 1
    assert done.stderr.count("building the workload") == 1
    assert "all steps were timed on 2 devices that exchange gradients" in done.stdout + done.stderr
    evidence = yaml.safe_load((folder / "policy.yaml").read_text())["evidence"]
    assert evidence["devices"] == 2
    assert evidence["samples_per_s"] * evidence["step_ms"] / 1000 == pytest.approx(2 * 16, rel=0.01)
    checked = torchrun("verify", "policy.yaml", "train.py:small", "--device", "cpu", "--json", folder=folder)
    answer = json.loads(checked.stdout)
    assert checked.returncode == (0 if answer["holds"] else 1), checked.stderr
    assert not [one for one in answer["findings"] if one.get("label") == "devices"]


@pytest.mark.parametrize(
    ("command", "processes", "said"),
    [
        (SMALL, "4", "torchrun started 4 processes, 2 of them on this node, and amptune measures on one"),
        ((*SMALL, "--devices", "3"), "2", "torchrun started 2 processes: leave it out"),
        ((*SMALL, "--workers", "2"), "2", "torchrun's processes train together: leave it out"),
        (("verify", "amp-bf16", "train.py:small"), "4", "start it with --nnodes 1"),
    ],
)
def test_what_torchrun_started_otherwise_is_refused(
    folder: Path, command: tuple[str, ...], processes: str, said: str
) -> None:
    done = process(*command, folder=folder, **FIRST | {"WORLD_SIZE": processes})
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert not (folder / ".amptune").exists()


def test_each_process_of_torchrun_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = 2
    monkeypatch.setattr("amptune.cli.device.gpu_count", lambda: gpus)
    job = Torchrun(rank=0, processes=2, on_this_node=2)
    require_ranks(job, "cuda")
    with pytest.raises(DeviceError, match="take the first 2 GPUs, and --device cuda:1 names one"):
        require_ranks(job, "cuda:1")
    gpus = 1
    with pytest.raises(DeviceError, match="and CUDA's driver has 1 GPU: give fewer with --nproc-per-node"):
        require_ranks(job, "cuda")


def test_with_fewer_gpus_than_devices_communication_is_not_measured_and_a_finding_says_so(folder: Path) -> None:
    options = ("--global-batch", "128", "--devices", "2", "--trials", "2", "--budget", "300s", "--json")
    done = run("tune", "train.py:small", *options, folder=folder, evaluator=Machine(batch_size=16))
    answer = json.loads(done.stdout)
    found = next(one for one in answer["findings"] if one["code"] == "communication-not-measured")
    assert (found["devices"], found["measured"]) == (2, 1)
    assert found["message"].startswith("2 devices will train together, and one was measured")
    assert "devices" not in yaml.safe_load((folder / "policy.yaml").read_text())["evidence"]


@pytest.mark.parametrize(
    ("devices", "device", "gpus", "ranks"), [(1, None, 8, 1), (2, None, 2, 2), (2, None, 1, 1), (2, "cuda:1", 2, 1)]
)
def test_steps_are_timed_on_all_devices_if_so_many_gpus_are_here(
    monkeypatch: pytest.MonkeyPatch, devices: int, device: str | None, gpus: int, ranks: int
) -> None:
    monkeypatch.setattr("amptune.search.request.gpu_count", lambda: gpus)
    assert ranks_of(devices, device) == ranks


def test_only_torchruns_own_variables_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**own, "LOCAL_DATA": "/data", "GROUP_NAME": "ours", "ROLE_ARN": "r"}.items():
        monkeypatch.setenv(name, value)
    assert take_over() == Torchrun(rank=1, processes=2, on_this_node=2)
    assert not own.keys() & os.environ.keys()
    assert (os.environ["LOCAL_DATA"], os.environ["GROUP_NAME"], os.environ["ROLE_ARN"]) == ("/data", "ours", "r")
