"""amptune with the oldest versions that it says it works with; `make test-newest` takes the newest."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

# The tests of what uses the packages of an extra. Numerics and the runtime use torch alone.
TESTS = {
    "tune": [
        *(f"tests/{folder}" for folder in ("policy", "hardware", "report")),
        *(f"tests/cli/test_{name}.py" for name in ("commands", "real_runs")),
        *(f"tests/search/test_{name}.py" for name in ("study", "pipeline", "study_report")),
    ],
    "integrations": [
        # a warning of transformers 4.46 itself, which uses what torch 2.13 calls old
        "-W=ignore:`torch.cpu.amp.autocast:FutureWarning",
        *(f"tests/integrations/test_{name}.py" for name in ("accelerate", "lightning", "transformers")),
    ],
}


def oldest(extra: str) -> Path:
    return Path(__file__).parent / f"oldest_{extra}.txt"


@pytest.mark.parametrize("extra", TESTS)
def test_the_oldest_versions_are_those_that_the_package_names(extra: str) -> None:
    named = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    if extra == "tune":
        named += [one for one in map(Requirement, PROJECT["dependencies"]) if one.name != "torch"]
    lines = [line.partition("#")[0].strip() for line in oldest(extra).read_text().splitlines()]
    versions = dict(line.split("==") for line in lines if "==" in line)
    for one in named:
        (least,) = (spec.version for spec in one.specifier if spec.operator == ">=")
        assert f"{versions[one.name]}.0".startswith(f"{least}.")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="versions as old as these have no wheels for newer Pythons")
@pytest.mark.parametrize("extra", TESTS)
def test_amptune_works_with_the_oldest_versions(extra: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(tmp_path), "-r", str(oldest(extra))], check=True)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    done = subprocess.run(
        [*command, *TESTS[extra]],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
