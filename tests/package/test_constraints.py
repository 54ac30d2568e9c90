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


def test_the_constraints_are_names_with_allowed_versions_of_all_packages_but_torch_and_its_own() -> None:
    lines = CONSTRAINTS.read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    versions = {normal(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(versions) == len(lines)
    for one in map(Requirement, sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])):
        if one.name not in ("torch", "amptune"):
            assert one.specifier.contains(versions[normal(one.name)]), one
    assert not versions.keys() & {"torch", "triton", "amptune", "setuptools"}
    assert {name for name in versions if name.startswith(("nvidia-", "cuda-"))} == {"nvidia-ml-py"}


def test_make_installs_the_tested_versions_and_test_newest_the_newest(tmp_path: Path) -> None:
    venv = f"VENV={tmp_path / 'venv'}"
    tested = installs("setup", venv)
    assert len(tested) == 3
    assert all("--constraint tests/package/constraints.txt" in line for line in tested)
    newest = installs("test-newest", venv)
    assert len(newest) >= 3
    assert not [line for line in newest if "--constraint" in line]
    assert all(f"{tmp_path}/venv/newest/bin/pip" in line for line in newest)
