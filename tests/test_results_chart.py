"""The pictures and pages that are made from evidence: docs/results.svg, docs/results.md, docs/example-report.html."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "reports"))  # programs, no package

import chart
import example_page

from amptune.policy.file_io import parse_policy
from amptune.policy.policy_file import PolicyFile
from amptune.policy.serialization import policy_from_dict
from amptune.policy.yaml_text import parse

REPOSITORY = Path(__file__).resolve().parent.parent
README, RESULTS = ((REPOSITORY / page).read_text() for page in ("README.md", "docs/results.md"))
COLUMNS = ["stock", "best AMP recipe", "pytorch-autotune", "amptune"]


def times_ms(path: Path) -> dict[str, float]:
    """By contender, the geometric mean over its blocks of the block's mean, read without the program's code."""
    data = json.loads(path.read_text())
    rows = [row for one in data["comparison"]["rounds"] for row in one["rows"]]

    def ms(name: str) -> float:
        policy = data["comparison"]["contenders"][name]
        blocks = [row["outcome"]["step_ms"] for row in rows if row["policy"] == policy]
        return statistics.geometric_mean(map(statistics.fmean, blocks))

    own_step_ms = statistics.median(data["autotune"]["own_step_ms"])
    recipe, autotune = min(ms("amp bf16"), ms("amp fp16")), min(ms("pytorch-autotune"), own_step_ms)
    return dict(zip(COLUMNS, (ms("stock"), recipe, autotune, ms("amptune")), strict=True))


@pytest.mark.parametrize("result", chart.results(), ids=lambda result: result.workload)
def test_a_result_is_read_from_its_raw_samples_and_stands_on_the_page(result: chart.Result) -> None:
    assert result.times_ms == pytest.approx(times_ms(chart.RIVALS / f"{result.workload}.json"))
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
    said = re.search(words, " ".join(RESULTS.split()))
    assert said is not None
    assert [float(figure) for figure in said.groups()] == [float(f"{ratio:.1f}") for ratio in ratios]


def test_the_picture_in_docs_is_what_the_program_draws_and_its_bars_are_as_long_as_the_speeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["chart.py", "--check"])
    assert chart.main() == 0
    svg: Any = ElementTree.fromstring(chart.CHART.read_text(encoding="utf-8"))  # noqa: S314  # our own file
    speeds = [result.speeds for result in chart.results()]
    longest = max(one["amptune"] for one in speeds)
    for name in chart.CONTENDERS:
        bars = [
            bar for bar in svg.iter("{http://www.w3.org/2000/svg}rect") if bar.get("class") == name.replace(" ", "-")
        ]
        lengths = sorted(float(bar.get("width")) for bar in bars if bar.get("x") == str(chart.LEFT))
        wanted = sorted(one[name] / longest * (chart.RIGHT - chart.LEFT) for one in speeds)
        assert lengths == pytest.approx(wanted, abs=0.1)


def test_the_policy_that_the_readme_shows_is_the_one_that_was_found() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    shown = parse_policy(parse(block, "README.md"))
    found = json.loads((chart.RIVALS / "resnet50.json").read_text())["amptune"]["policy"]
    assert isinstance(shown, PolicyFile)
    assert shown.policy == policy_from_dict(found)


def test_the_example_of_a_report_in_docs_is_what_its_program_writes() -> None:
    """Without the figures, whose last digit may depend on the version of a library."""
    words = [re.sub(r"[\d.,]+", "#", page) for page in (example_page.PAGE.read_text("utf-8"), example_page.page())]
    assert words[0] == words[1]
