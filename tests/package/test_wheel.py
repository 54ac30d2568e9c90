"""The wheel and the source distribution: their contents, and their use from an environment that had nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from distributions import normal, required_by

import amptune

REPOSITORY = Path(__file__).resolve().parents[2]

# Building and installing fetches packages, and takes about a minute.
pytestmark = pytest.mark.slow


class Environment:
    """A virtual environment of its own."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.folder = folder

    def run(self, program: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command of this environment, from outside of the repository."""
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=folder or self.folder, env=clean
        )

    def output_of(self, *command: str, folder: Path | None = None) -> str:
        done = self.run(*command, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *requirements: str) -> None:
        self.output_of("pip", "install", "--quiet", "--disable-pip-version-check", *requirements)

    def packages(self) -> set[str]:
        listed = self.output_of("pip", "list", "--format", "freeze", "--disable-pip-version-check")
        return {normal(line.partition("==")[0]) for line in listed.split()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both, the wheel made from the source distribution; checked as an index would check them."""
    tools = Environment(tmp_path_factory.mktemp("tools"))
    tools.install("build", "twine")
    out = tmp_path_factory.mktemp("dist")
    tools.output_of("python", "-m", "build", "--outdir", str(out), str(REPOSITORY))
    tools.output_of("twine", "check", "--strict", *map(str, out.iterdir()))
    return out


def test_the_wheel_holds_the_package_and_its_search_spaces_and_the_sdist_what_it_takes_to_test_it(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("dist-info/METADATA"))
    files = [path for path in (REPOSITORY / "amptune").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    package = {str(path.relative_to(REPOSITORY)) for path in files}
    spaces = {f"amptune/search_spaces/{path.name}" for path in (REPOSITORY / "search_spaces").glob("*.yaml")}
    info = f"amptune-{amptune.__version__}.dist-info"
    assert {name for name in names if not name.startswith(info)} == package | spaces
    assert "amptune/py.typed" in package
    assert f"{info}/licenses/LICENSE" in names
    always = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert set(map(normal, always)) == {"torch", "pyyaml", "typing-extensions"}
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "CITATION.cff", "docs/results.svg", "examples/plain_loop.py", "tests/conftest.py"} <= held
    assert not [name for name in held if name.endswith((".pyc", ".whl")) or name.startswith((".venv", "policy.yaml"))]


@pytest.fixture(scope="module")
def training_node(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel, what it requires, and torch: linked from here, because it is large."""
    node = Environment(tmp_path_factory.mktemp("node"))
    (packages,) = node.folder.glob("lib/python*/site-packages")
    for name in required_by("torch"):
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or () if ".." not in path.parts}:
            if top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    node.install(str(next(built.glob("*.whl"))))
    return node


TRAINING = """
import amptune, torch
policy = amptune.PolicyFile(policy=amptune.Policy(autocast="bf16", memory_format="channels_last"))
amptune.save(policy, "policy.yaml")
model = torch.nn.Conv2d(3, 4, 3)
with amptune.apply("policy.yaml", model, guard=True) as tuned:
    optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with tuned.autocast():
        loss = tuned.model(tuned.batch(torch.randn(2, 3, 8, 8))).float().square().mean()
    tuned.scaler.scale(loss).backward()
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
print(amptune.__file__, loss.dtype)
"""


def test_the_wheel_trains_in_an_empty_environment_tunes_with_its_extra_and_then_both(
    built: Path, training_node: Environment, tmp_path: Path
) -> None:
    before = required_by("torch") | {"pip", "setuptools"}
    assert training_node.packages() - before == {"amptune", "pyyaml"}
    assert str(training_node.folder) in training_node.output_of("python", "-c", TRAINING, folder=tmp_path)
    lacking = training_node.run("amptune", "probe", folder=tmp_path)
    assert (lacking.returncode, lacking.stderr.count("\n")) == (2, 1)
    assert "pip install '.[tune]'" in lacking.stderr

    training_node.install(f"{next(built.glob('*.whl'))}[tune]")
    assert "cpu" in training_node.output_of("amptune", "probe", "--json", folder=tmp_path)
    training_node.output_of("amptune", "init", "train_workload.py", folder=tmp_path)
    tuning = ["train_workload.py:workload", "--budget", "20s", "--no-compile", "-o", "tuned.yaml"]
    training_node.output_of("amptune", "tune", *tuning, folder=tmp_path)
    applied = "import amptune, torch; amptune.apply('tuned.yaml', torch.nn.Linear(2, 2))"
    training_node.output_of("python", "-W", "ignore", "-c", applied, folder=tmp_path)
