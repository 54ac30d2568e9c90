"""`make` installs the versions that its tests were green with; `make test-newest` takes the newest."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

from distributions import normal
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONSTRAINTS = Path(__file__).parent / "constraints.txt"


def installs(goal: str, *variables: str) -> list[str]:
    """The `pip install` commands that a goal would run in an empty environment."""
    command = ["make", "--dry-run", goal, *variables]
    alone = {"PATH": os.environ["PATH"]}  # `make test` hands its own variables on
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY, env=alone)
    return [line for line in done.stdout.splitlines() if "pip install" in line]


def test_the_constraints_are_names_with_versions_and_nothing_else() -> None:
    lines = CONSTRAINTS.read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert len({normal(line.partition("==")[0]) for line in lines}) == len(lines)


def test_every_package_that_make_installs_has_its_version_there_and_the_version_is_allowed() -> None:
    pinned = (line.split("==") for line in CONSTRAINTS.read_text().splitlines())
    versions = {normal(name): version for name, version in pinned}
    lines = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    for one in map(Requirement, lines):
        if one.name not in ("torch", "amptune"):
            assert one.specifier.contains(versions[normal(one.name)]), one


def test_torch_and_what_cuda_needs_are_left_to_the_makefile_and_to_torch() -> None:
    named = [normal(line.partition("==")[0]) for line in CONSTRAINTS.read_text().split()]
    assert "nvidia-ml-py" in named
    others = [name for name in named if name.startswith(("nvidia-", "cuda-")) and name != "nvidia-ml-py"]
    assert [name for name in named if name in ("torch", "triton", "amptune", "setuptools")] + others == []


def test_make_installs_the_tested_versions_and_test_newest_the_newest(tmp_path: Path) -> None:
    venv = f"VENV={tmp_path / 'venv'}"
    tested = installs("setup", venv)
    assert len(tested) == 3
    assert all("--constraint tests/package/constraints.txt" in line for line in tested)
    newest = installs("test-newest", venv)
    assert len(newest) >= 3
    assert not [line for line in newest if "--constraint" in line]
    assert all(f"{tmp_path}/venv/newest/bin/pip" in line for line in newest)
