"""The notebook for a T4 runs from top to bottom, here without a GPU as a rule, and is committed without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "t4.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]

# Runs a cell after another in one namespace, as Jupyter does: `!` lines are commands, with {names} of the notebook's.
RUNNER = """
import json, subprocess, sys
names = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    if source.startswith("!"):
        command = source[1:].format(**names).replace("amptune", f"{sys.executable} -m amptune", 1)
        print(command, flush=True)
        subprocess.run(command, shell=True, check=True)
    else:
        exec(source, names)
"""


def code() -> list[str]:
    """The code cells, without the one that installs."""
    sources = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
    assert [source for source in sources if source.startswith("%")] == ["%pip install --quiet 'amptune[tune]'"]
    return [source for source in sources if not source.startswith("%")]


def test_the_notebook_is_of_format_4_without_outputs_and_its_lines_are_python_or_single_commands() -> None:
    content = json.loads(NOTEBOOK.read_text())
    assert (content["nbformat"], content["metadata"]["accelerator"]) == (4, "GPU")
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []
    for source in code():
        if source.startswith("!"):
            assert source.startswith("!amptune ")
            assert "\n" not in source
        else:
            compile(source, "cell", "exec")


@pytest.mark.slow  # it tunes for a minute
@pytest.mark.timeout(1200)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    path = os.pathsep.join(
        [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    )  # a kernel has its folder first
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(code()),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained: loss" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("loss ")
    assert (tmp_path / "report.html").exists()
