"""The examples that the docs point to run as they stand, each in a process of its own, and learn."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import budget_here

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
PAGE = (REPOSITORY / "docs" / "frameworks.md").read_text()

# Each takes a process, and some seconds to import its framework.
slow = pytest.mark.slow
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def needing(script: str, *packages: str) -> Any:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.param(script, marks=[slow, pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")])


def output_of(*arguments: str, folder: Path = REPOSITORY) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


TUNED = [
    needing("tune_a_loop.py"),
    needing("tune_a_trainer.py", "transformers", "accelerate"),
    needing("tune_a_lightning_module.py", "lightning"),
]


@pytest.mark.parametrize(
    "script",
    [
        "plain_loop.py",
        *map(needing, ("gan.py", "coming_from_apex.py", "compiled.py", "activation_checkpointing.py")),
        pytest.param("cuda_graphs.py", marks=[pytest.mark.gpu, on_gpu]),
        *TUNED,
        needing("lightning_trainer.py", "lightning"),
        needing("transformers_trainer.py", "transformers", "accelerate"),
        needing("accelerate_loop.py", "accelerate"),
    ],
)
def test_an_example_learns(script: str, tmp_path: Path) -> None:
    # Some train with the policy.yaml of the folder they run in, and `make tune` writes one into the checkout.
    assert_learned(output_of(str(EXAMPLES / script), folder=tmp_path))


@slow
@pytest.mark.parametrize("script", ["ddp.py", "fsdp2.py"])
def test_an_example_of_two_processes_learns_and_says_how_to_start_it(script: str) -> None:
    path = str(EXAMPLES / script)
    alone = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert alone.returncode == 1
    assert alone.stderr.splitlines()[-1] == f"start this by: torchrun --standalone --nproc-per-node 2 {script}"
    assert_learned(output_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path))


@slow
def test_the_example_of_export_computes_what_the_model_does() -> None:
    assert "computes what the model does, its head in torch.float32" in output_of(str(EXAMPLES / "export.py"))


@pytest.mark.parametrize("script", TUNED)
def test_an_example_that_is_tuned_as_it_stands_trains_under_its_policy(script: str, tmp_path: Path) -> None:
    path = str(EXAMPLES / script)
    tune = ("-m", "amptune", "tune", path, "--budget", budget_here(10), "--trials", "2")
    assert "written to policy.yaml" in output_of(*tune, folder=tmp_path)
    assert_learned(output_of(path, folder=tmp_path))


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


def assert_learned(output: str) -> None:
    (figures,) = re.findall(r"(?:loss|distance) ([\d.]+) -> ([\d.]+)", output)
    first, last = map(float, figures)
    assert last < 0.9 * first
