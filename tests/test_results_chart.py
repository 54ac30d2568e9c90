"""The pictures and pages that are made from evidence: docs/results.svg, docs/results.md, docs/example-report.html."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "reports"))  # programs, no package

import chart
import example_page

from amptune.policy.file_io import parse_policy
from amptune.policy.policy_file import PolicyFile
from amptune.policy.yaml_text import parse

REPOSITORY = Path(__file__).resolve().parent.parent
README, RESULTS = ((REPOSITORY / page).read_text() for page in ("README.md", "docs/results.md"))
COLUMNS = ["stock", "best AMP recipe", "pytorch-autotune", "amptune"]


@pytest.mark.parametrize("result", chart.results(), ids=lambda result: result.workload)
def test_a_result_stands_on_the_page(result: chart.Result) -> None:
    name, size = chart.NAMES[result.workload]
    (row,) = [line for line in RESULTS.splitlines() if line.startswith(f"| {name.removesuffix('*')}")]
    cells = [cell.strip() for cell in row.split("|")[1:]]
    assert size in cells[0]
    assert ("†" in cells[0], "*" in cells[0]) == (result.is_provisional, name.endswith("*"))
    assert [float(cell) for cell in cells[1:5]] == [float(f"{result.times_ms[name]:.3g}") for name in COLUMNS]


def test_the_page_of_results_has_the_ratios_of_the_geometric_means() -> None:
    every = chart.results()
    quiet = [result for result in every if result.workload not in chart.HOST_BOUND]
    ratios = [
        statistics.geometric_mean(one.speeds["amptune"] / one.speeds[name] for one in found)
        for found in (quiet, every)
        for name in ("best AMP recipe", "pytorch-autotune")
    ]
    words = r"amptune is ([\d.]+) times .* AMP recipe and ([\d.]+) times .*?; with them, ([\d.]+) and ([\d.]+) times"
    said = re.search(words, " ".join(RESULTS.partition("## Ten models")[2].split()))
    assert said is not None
    assert [float(figure) for figure in said.groups()] == [float(f"{ratio:.1f}") for ratio in ratios]


def test_the_picture_in_docs_is_what_the_program_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["chart.py", "--check"])
    assert chart.main() == 0


def test_the_policy_that_the_readme_shows_is_the_one_that_was_found() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    shown = parse_policy(parse(block, "README.md"))
    assert isinstance(shown, PolicyFile)
    found = (chart.RIVALS.parent / "scripts" / "classifier_again.txt").read_text()
    (answer,) = [line for line in found.splitlines() if line.startswith(f"{shown.policy}: ")]
    (sure,) = [line for line in found.splitlines() if line.startswith("confirmed")]
    assert f"{answer}\n{sure}\n" in README


def test_the_example_of_a_report_in_docs_is_what_its_program_writes() -> None:
    """Without the figures, whose last digit may depend on the version of a library."""
    words = [re.sub(r"[\d.,]+", "#", page) for page in (example_page.PAGE.read_text("utf-8"), example_page.page())]
    assert words[0] == words[1]
