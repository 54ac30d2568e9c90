"""The README's bar chart: drawn from the raw results, and saying what they say."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parent.parent / "reports"))  # programs, no package

import chart

from amptune.policy.file_io import parse_policy
from amptune.policy.policy_file import PolicyFile
from amptune.policy.serialization import policy_from_dict
from amptune.policy.yaml_text import parse

SVG = "{http://www.w3.org/2000/svg}"
PATHS = sorted(chart.RIVALS.glob("*.json"))


def picture() -> ElementTree.Element:
    return ElementTree.fromstring(chart.CHART.read_text(encoding="utf-8"))  # noqa: S314  # our own file


def times_ms(comparison: dict[str, Any], name: str) -> float:
    """The geometric mean over the comparison's blocks of the block's mean, read without amptune's code."""
    policy = comparison["contenders"][name]
    rows = [row for one in comparison["rounds"] for row in one["rows"] if row["policy"] == policy]
    return statistics.geometric_mean(statistics.fmean(row["outcome"]["step_ms"]) for row in rows)


def speeds(path: Path) -> dict[str, float]:
    data = json.loads(path.read_text())
    ms = {name: times_ms(data["comparison"], name) for name in data["comparison"]["contenders"]}
    own_step_ms = statistics.median(data["autotune"]["own_step_ms"])
    return {
        "amptune": ms["stock"] / ms["amptune"],
        "pytorch-autotune": ms["stock"] / min(ms["pytorch-autotune"], own_step_ms),
        "best AMP recipe": ms["stock"] / min(ms["amp bf16"], ms["amp fp16"]),
    }


def words_of(path: Path) -> str:
    name, size = chart.NAMES[path.stem]
    provisional = json.loads(path.read_text())["amptune"]["provisional"]
    return f"{name}{'†' if provisional else ''} {size}".strip()


def test_the_picture_in_docs_is_what_the_program_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chart.py", "--check"])
    assert chart.main() == 0
    monkeypatch.setattr(chart, "CHART", tmp_path / "results.svg")
    assert chart.main() == 1
    assert "`python reports/chart.py` draws it" in capsys.readouterr().err


def test_drawing_twice_gives_the_same_bytes() -> None:
    assert chart.drawn(chart.results()) == chart.drawn(chart.results())


def test_the_picture_is_well_formed_and_says_what_it_shows_without_being_seen() -> None:
    root = picture()
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert [(root.findtext(f"{SVG}{tag}") or "") != "" for tag in ("title", "desc")] == [True, True]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_workload_of_the_results_stands_in_the_picture_with_its_figures(path: Path) -> None:
    texts = [" ".join("".join(text.itertext()).split()) for text in picture().iter(f"{SVG}text")]
    place = texts.index(words_of(path))
    assert texts[place + 1].startswith(f"{speeds(path)['amptune']:.1f}×")
    figures = ", ".join(f"{name} {speed:.1f}×" for name, speed in speeds(path).items())
    assert f"{words_of(path)}: {figures}." in (picture().findtext(f"{SVG}desc") or "")


def test_the_bars_are_as_long_as_the_speeds() -> None:
    found = [speeds(path) for path in PATHS]
    for name in chart.CONTENDERS:
        bars = [bar for bar in picture().iter(f"{SVG}rect") if bar.get("class") == name.replace(" ", "-")]
        lengths = sorted(float(bar.get("width") or 0) for bar in bars if bar.get("x") == str(chart.LEFT))
        longest = max(one["amptune"] for one in found)
        wanted = sorted(one[name] / longest * (chart.RIGHT - chart.LEFT) for one in found)
        assert lengths == pytest.approx(wanted, abs=0.1)


def test_the_caption_has_the_geometric_means() -> None:
    found = [speeds(path) for path in PATHS]
    means = [statistics.geometric_mean(one[name] for one in found) for name in chart.CONTENDERS]
    (caption,) = [text.text or "" for text in picture().iter(f"{SVG}text") if "means" in (text.text or "")]
    assert re.findall(r"[\d.]+×", caption) == [f"{mean:.1f}×" for mean in means]


README = (Path(__file__).parent.parent / "README.md").read_text()
RESULTS = (Path(__file__).parent.parent / "docs" / "results.md").read_text()


def test_the_policy_that_the_readme_shows_is_the_one_that_was_found() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    shown = parse_policy(parse(block, "README.md"))
    found = json.loads((chart.RIVALS / "resnet50.json").read_text())["amptune"]["policy"]
    assert isinstance(shown, PolicyFile)
    assert shown.policy == policy_from_dict(found)


COLUMNS = ["stock", "best AMP recipe", "pytorch-autotune", "amptune"]


@pytest.mark.parametrize("result", chart.results(), ids=lambda result: result.workload)
def test_the_page_of_results_has_their_step_times(result: chart.Result) -> None:
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
