"""The examples that the docs point to run as they stand, each in a process of its own, and learn."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import budget_here

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
PAGE = (REPOSITORY / "docs" / "frameworks.md").read_text()

# Each takes a process, and some seconds to import its framework.
slow = pytest.mark.slow
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def output_of(script: str, *launcher: str) -> str:
    return output_of_command(*launcher, str(EXAMPLES / script))


def output_of_command(*arguments: str, folder: Path | None = None) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "script",
    [
        "plain_loop.py",
        pytest.param("gan.py", marks=slow),
        pytest.param("coming_from_apex.py", marks=slow),
        pytest.param("compiled.py", marks=slow),
        pytest.param("activation_checkpointing.py", marks=slow),
        pytest.param("cuda_graphs.py", marks=[pytest.mark.gpu, on_gpu]),
        pytest.param("tune_a_loop.py", marks=slow),
        pytest.param("tune_a_trainer.py", marks=[slow, needs("transformers"), needs("accelerate")]),
        pytest.param("tune_a_lightning_module.py", marks=[slow, needs("lightning")]),
        pytest.param("lightning_trainer.py", marks=[slow, needs("lightning")]),
        pytest.param("transformers_trainer.py", marks=[slow, needs("transformers"), needs("accelerate")]),
        pytest.param("accelerate_loop.py", marks=[slow, needs("accelerate")]),
    ],
)
def test_an_example_learns(script: str) -> None:
    assert_learned(output_of(script))


@slow
@pytest.mark.parametrize("script", ["ddp.py", "fsdp2.py"])
def test_an_example_of_two_processes_says_how_to_start_it(script: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"start this by: torchrun --standalone --nproc-per-node 2 {script}"


@slow
@pytest.mark.parametrize("script", ["ddp.py", "fsdp2.py"])
def test_an_example_of_two_processes_learns(script: str) -> None:
    assert_learned(output_of(script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))


@slow
def test_the_example_of_export_computes_what_the_model_does() -> None:
    assert "computes what the model does, its head in torch.float32" in output_of("export.py")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("tune_a_loop.py", marks=slow),
        pytest.param("tune_a_trainer.py", marks=[slow, needs("transformers"), needs("accelerate")]),
        pytest.param("tune_a_lightning_module.py", marks=[slow, needs("lightning")]),
    ],
)
def test_an_example_that_is_tuned_as_it_stands_trains_under_its_policy(script: str, tmp_path: Path) -> None:
    tune = ("-m", "amptune", "tune", str(EXAMPLES / script), "--budget", budget_here(10), "--trials", "2")
    assert "written to policy.yaml" in output_of_command(*tune, folder=tmp_path)
    assert_learned(output_of_command(str(EXAMPLES / script), folder=tmp_path))


def test_every_example_stands_in_the_docs_and_is_run_here() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert {Path(link).name for link in re.findall(r"\(\.\./examples/([a-z0-9_]+\.py)\)", PAGE)} == scripts
    assert all(f'"{script}"' in Path(__file__).read_text() for script in scripts)


SLURM = EXAMPLES / "slurm"


@pytest.mark.parametrize("script", sorted(SLURM.glob("*.s*")), ids=lambda path: path.name)
def test_a_script_for_slurm_is_one_that_bash_reads(script: Path) -> None:
    bash = shutil.which("bash") or "bash"
    done = subprocess.run([bash, "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("sinfo") is None, reason="needs Slurm")
def test_on_slurm_training_waits_for_the_profile_and_that_for_the_tunings(tmp_path: Path) -> None:
    """On whatever cluster this runs; its first node's first feature is the kind of GPU. Needs a node with a GPU."""
    sinfo = [shutil.which("sinfo") or "sinfo", "-h", "-o", "%f"]
    listed = subprocess.run(sinfo, capture_output=True, text=True, timeout=60, check=False)
    if listed.returncode != 0:
        pytest.skip(f"Slurm does not answer: {listed.stderr}")
    feature = listed.stdout.split(",")[0].split()[0]
    shutil.copy(EXAMPLES / "tune_a_loop.py", tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    submit = [str(SLURM / "submit.sh"), "tune_a_loop.py:workload", "tune_a_loop.py", feature]
    given = os.environ | {"PATH": path, "BUDGET": budget_here(15)}
    subprocess.run(submit, cwd=tmp_path, env=given, check=True, timeout=60)
    until_s = time.monotonic() + 240
    while not (logs := [log for log in tmp_path.glob("train-*.log") if " -> " in log.read_text()]):
        assert time.monotonic() < until_s, [log.read_text() for log in tmp_path.glob("*.log")]
        time.sleep(1)
    assert_learned(logs[0].read_text())
    assert "schema: amptune.profile/1" in (tmp_path / "policy.yaml").read_text()


def assert_learned(output: str) -> None:
    (figures,) = re.findall(r"(?:loss|distance) ([\d.]+) -> ([\d.]+)", output)
    first, last = map(float, figures)
    assert last < 0.9 * first
