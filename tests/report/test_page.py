"""A study's answer as a page: what stands on it, that it stands alone, and that nothing in it is taken for HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from measurements import took
from studies import BF16, LAST, TUNING, compared, record, rich

from amptune.policy.file_io import parse_policy
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.policy.yaml_text import parse
from amptune.report.markup import interval, memory, number, times
from amptune.report.page import page_of, page_without_answer
from amptune.report.plot import HEIGHT, LINE, Bar, ChartMark, axis_for, bars, scatter
from amptune.search.decide.study_report import StudyReport, findings_of, study_report_of
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row

SECTIONS = ["verdict", "policy", "settings", "trials", "numerics", "findings"]


def study_report(objective: Objective = THROUGHPUT, rows: tuple[Row, ...] | None = None) -> StudyReport:
    return study_report_of(record(rows=compared() if rows is None else rows), objective)


class Page(HTMLParser):
    """The texts of a page by their element, and its tags; what is opened has to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in ("meta", "path"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.words.append((self.open[-1], data.strip()))

    def texts(self, tag: str) -> list[str]:
        return [text for kind, text in self.words if kind == tag]

    @property
    def sections(self) -> list[str | None]:
        return [attributes.get("id") for tag, attributes in self.tags if tag == "section"]

    @property
    def whole(self) -> str:
        return " ".join(text for kind, text in self.words if kind not in ("style", "script"))


def shown(found: StudyReport) -> Page:
    return Page(page_of(found, findings_of(found)))


@pytest.mark.parametrize(
    "found",
    [
        study_report(),
        study_report(Objective("memory")),
        study_report(Objective("energy")),
        study_report_of(record(trials=record().trials[:1], judged=()), THROUGHPUT),
        study_report_of(rich(), Objective("memory")),
    ],
)
def test_every_study_has_all_sections_in_one_whole_page(found: StudyReport) -> None:
    assert shown(found).sections == SECTIONS


def test_the_page_stands_alone() -> None:
    page = shown(study_report())
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe"}
    assert not [name for _, attributes in page.tags for name in attributes if name in ("src", "href", "onclick")]
    text = page_of(study_report(), ())
    assert set(re.findall(r"https?://[^\"]+|@import|url\(", text)) == {"http://www.w3.org/2000/svg"}


def test_nothing_of_the_user_is_taken_for_html() -> None:
    page = shown(study_report())
    assert page.texts("h1") == ['small <script>alert("x")</script> on NVIDIA H200']
    assert "CUDA <out> of memory & more" in page.texts("td")
    tuning = replace(TUNING, hardware="<u>", target="<u>", software=(("<u>", "<u>"),), valid_for=(("<u>", "<u>"),))
    assert "<u>" not in page_of(study_report_of(record(tunings=(tuning,), rows=compared()), THROUGHPUT), ())


def test_the_verdict_is_a_sentence_with_its_interval_and_certainty() -> None:
    page = shown(study_report_of(rich(), THROUGHPUT))
    sentence = page.texts("p")[2]
    assert sentence.startswith("ResNet-50 on NVIDIA H200: ")
    assert "2.50× [2.4" in sentence
    assert "confirmed" in page.texts("span")
    assert "over 99.9 % sure" in page.whole
    trials = tuple(trial for trial in record().trials if trial.policy != BF16)
    page = shown(study_report_of(record(trials=trials, rows=compared((trials[0].policy, LAST))), THROUGHPUT))
    assert any("trains worse than FP32" in text for text in page.texts("span"))


def test_an_answer_that_is_not_confirmed_is_provisional_with_the_command_that_measures_more() -> None:
    trials = (*record().trials[:1], replace(record().trials[1], outcome=took(8.5, 700.0)))
    page = shown(study_report_of(record(trials=trials), THROUGHPUT))
    assert "provisional" in page.texts("span")
    assert page.texts("pre")[0] == "amptune tune train.py:small --objective throughput --study runs"
    interrupted = Finding(code="interrupted", message="the tuning was interrupted: this is the best so far")
    page = shown(study_report_of(replace(rich(), findings=(interrupted,)), THROUGHPUT))
    assert "provisional" in page.texts("span")
    assert "confirmed" not in page.texts("span")
    assert interrupted.message in page.texts("li")


def test_rows_that_are_faster_than_a_kept_baseline_say_why_they_did_not_win() -> None:
    trials = (*record().trials[:1], replace(record().trials[1], outcome=took(9.97, 700.0)))
    page = shown(study_report_of(record(trials=trials), THROUGHPUT))
    assert "undecided" in page.texts("span")
    assert any("keep what you have" in text for text in page.texts("p"))
    assert any(text.startswith("not shown to be better than the baseline") for text in page.texts("td"))


def test_the_policy_is_a_file_to_save() -> None:
    file: Any = parse_policy(
        parse(Page(page_of(study_report_of(rich(), THROUGHPUT), ())).texts("pre")[0], "policy.yaml")
    )
    assert file.policy == replace(LAST, batch_size=32)
    assert file.valid_for["nvidia.com/gpu.product"] == "NVIDIA-H200"


def test_failures_stand_by_their_kind_with_what_to_do_the_baselines_too() -> None:
    page = shown(study_report())
    assert "oom: 1 did not fit into memory: a smaller batch, or accumulate." in page.texts("p")
    assert "train.py:7" in page.texts("td")
    page = Page(page_without_answer(record(trials=(replace(record().trials[-1], policy=Policy()),)), "oom <there>"))
    assert (page.sections, "oom <there>" in page.texts("p")) == (SECTIONS, True)


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("td", "memory_format channels_last"),
        ("td", "body.7.attention.qkv"),
        ("td", "the gradient of weight is off by 4%"),
        ("td", "580.1"),
    ],
)
def test_a_study_that_kept_all_shows_it(tag: str, text: str) -> None:
    assert text in shown(study_report_of(rich(), THROUGHPUT)).texts(tag)


def test_curves_of_the_judgement_have_fp32s_runs_as_a_band() -> None:
    judged = tuple(
        replace(one, losses=(2.3, 2.05, 1.9), losses_fp32=((2.3, 2.0, 1.9), (2.5, 2.2, 1.8))) for one in rich().judged
    )
    page = shown(study_report_of(replace(rich(), judged=judged), THROUGHPUT))
    assert any("differ by 2.5 % of the loss at most" in text for text in page.texts("p"))  # from the first run


def test_findings_come_with_what_to_do() -> None:
    page = shown(study_report_of(rich(), THROUGHPUT))
    assert "Nothing: training runs in this state too. A higher power limit makes both faster." in page.texts("span")


def test_every_row_is_as_wide_as_its_headings() -> None:
    text = page_of(study_report(Objective("memory")), ())
    for table in re.findall(r"<table style.*?</table>", text, re.DOTALL):
        headings = table.count("<th>")
        for row in re.findall(r"<tr[^>]*><td.*?</tr>", table):
            spans = [int(span) for span in re.findall(r'colspan="(\d+)"', row)]
            assert row.count("<td") - len(spans) + sum(spans) == headings


def test_without_energy_there_is_no_chart_and_no_column_of_it() -> None:
    plain = replace(record().trials[0], outcome=took())
    page = shown(study_report_of(record(trials=(plain,)), THROUGHPUT))
    assert "energy, J per sample" not in page.texts("span")
    assert ("J/sample" in page.texts("th"), "J/sample" in shown(study_report()).texts("th")) == (False, True)


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [3.0, 3.1], [1e-4, 2.5e-4], [812.0, 91_000.0], [5e8, 6e8]])
def test_an_axis_holds_all_values_and_has_a_few_round_ticks(values: list[float]) -> None:
    axis = axis_for("x", values)
    assert all(0.0 < axis.place(value) < 100.0 or value == axis.low for value in values)
    assert 3 <= len(axis.ticks) <= 9
    assert len({axis.text(tick) for tick in axis.ticks}) == len(axis.ticks)
    assert all(axis.low <= tick * 1.000001 and tick <= axis.high * 1.000001 for tick in axis.ticks)


def test_labels_keep_clear_of_each_other_and_of_the_edge() -> None:
    marks = [
        ChartMark(x=1.0, y=1.0, kind="trial", title="t"),
        *(ChartMark(x=9.0, y=5.0 + i / 100, kind="recipe", title="t", label=f"label {i}") for i in range(3)),
    ]
    text = scatter(marks, "x", "y")
    found = re.findall(r'class="label recipe" style="(left|right):calc\([\d.]+% \+ 13px\);bottom:(\d+)px', text)
    heights = sorted(int(height) for _, height in found)
    assert all(above + LINE <= below for above, below in pairwise(heights))
    assert all(0 < height < HEIGHT for height in heights)
    assert {side for side, _ in found} == {"right"}


def test_the_frontier_is_a_staircase_of_what_nothing_beats() -> None:
    spots = [(1.0, 2.0), (2.0, 1.0), (3.0, 5.0), (4.0, 9.0)]
    marks = [ChartMark(x=x, y=y, kind="trial", title="") for x, y in spots[:3]]
    marks.append(ChartMark(x=4.0, y=9.0, kind="rejected", title=""))
    (points,) = re.findall(r'<polyline points="([^"]+)"', scatter(marks, "x", "y"))
    corners = [tuple(map(float, corner.split(","))) for corner in points.split()]
    assert len(corners) == 4  # up to (1, 2), along to 3, up to (3, 5), along to the edge
    assert corners[0][1] == corners[1][1] > corners[2][1] == corners[3][1]


def test_hidden_marks_are_drawn_once_named_ones_always_and_bars_with_their_interval() -> None:
    marks = [ChartMark(x=1.0, y=1.0, kind="trial", title="same place") for _ in range(500)]
    marks += [ChartMark(x=1.0, y=1.0, kind="winner", title="w"), ChartMark(x=2.0, y=2.0, kind="baseline", title="b")]
    assert scatter(marks, "x", "y").count('<i class="m ') == 3
    text = bars([Bar(name="a & b", end=2.0, words="2×", between=(1.5, 2.5))], 4.0)
    assert "left:0.00%;width:50.00%" in text
    assert "left:37.50%;width:25.00%" in text
    assert "a &amp; b" in text


def test_figures_have_few_digits_and_their_unit() -> None:
    assert [number(value) for value in (None, 0.0, 0.001234, 1.5, 9.99999, 61.75, 12345.6)] == [
        "", "0", "0.001234", "1.500", "10.00", "61.75", "12,346",
    ]  # fmt: skip
    assert [memory(value) for value in (None, 720.0, 2048.0)] == ["", "720 MiB", "2.0 GiB"]
    same = Ratio(value=1.0, low=1.0, high=1.0)
    assert (times(same), interval(same), times(None)) == ("1×", "", "")
