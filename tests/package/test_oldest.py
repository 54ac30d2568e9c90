"""amptune with the oldest versions that it says it works with; the newest are those that `make test` installs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
OLDEST = Path(__file__).parent / "oldest.txt"
# What uses these packages; numerics and the runtime use torch alone.
ROOMS = [
    "tests/policy",
    "tests/hardware",
    "tests/report",
    "tests/cli/test_commands.py",
    "tests/search/test_study.py",
    "tests/search/test_pipeline.py",
    "tests/search/test_study_report.py",
    "tests/cli/test_real_runs.py",
]


def pinned() -> dict[str, str]:
    lines = [line for line in OLDEST.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_oldest_versions_are_those_that_the_package_names() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["tune"]]
    oldest = {one.name: next(spec.version for spec in one.specifier if spec.operator == ">=") for one in named}
    del oldest["torch"]
    versions = pinned()
    del versions["pydantic_core"]  # pydantic 2.10.0 wants this one
    assert versions.keys() == oldest.keys()
    assert all(f"{versions[name]}.0".startswith(f"{oldest[name]}.") for name in oldest)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="versions as old as these have no wheels for newer Pythons")
def test_what_uses_other_packages_works_with_the_oldest_versions_of_them(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, "--disable-pip-version-check", "-r", str(OLDEST)], check=True)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    code = "import optuna, pydantic, sys; assert optuna.__version__ == '4.2.0'; assert pydantic.VERSION == '2.10.0'"
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *ROOMS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stdout[-8000:]
