"""A study's answer as a page: what stands on it, that it stands alone, and that nothing in it is taken for HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from measurements import took

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.report.chart import ChartMark, axis_for, scatter
from amptune.report.page import page_of
from amptune.search.decide.study_report import StudyReport, findings_of, study_report_of
from amptune.search.sampler.records import GateRecord, StudyRecord, TuningRecord
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
LAST = amp_recipe("bf16", memory_format="channels_last")
SMALL = replace(LAST, fused_optimizer=True)
VOID = {"meta", "br", "line", "circle", "rect", "path", "polyline", "link", "img"}


def measured(ms: float, mib: float, joules: float | None = None) -> Measurement:
    return took(ms, mib, energy_j_per_sample=joules)


OUTCOMES = {
    STOCK: measured(10.0, 1000.0, 0.5),
    BF16: measured(8.0, 700.0, 0.4),
    LAST: measured(4.0, 720.0, 0.25),
    SMALL: measured(9.0, 300.0, 0.3),
    FP16: measured(2.0, 500.0, 0.2),
}
OOM = Failure(kind="oom", message="CUDA <out> of memory & more", where="train.py:7")


def record(**changes: object) -> StudyRecord:
    trials = [
        Trial(number=i, policy=p, outcome=o, seconds=1.0, run="0", moment_s=i)
        for i, (p, o) in enumerate(OUTCOMES.items())
    ]
    failed = Trial(number=5, policy=Policy(cudnn_benchmark=True), outcome=OOM, seconds=1.0)
    tuning = TuningRecord(
        run="0",
        began="2026-11-21T05:00:00.000+00:00",
        workload='small <script>alert("x")</script>',
        target="train.py:small",
        folder=".amptune/small",
        hardware="NVIDIA H200",
        batch_size=32,
        baseline=STOCK,
        objective=THROUGHPUT,
        device="cuda",
    )
    judged = (
        GateRecord(policy=FP16, passes=False, used=3.0, words="fc: gradients overflow"),
        GateRecord(policy=LAST, passes=True, used=0.12, words="as good as FP32"),
    )
    whole = StudyRecord(name="small-1", where="runs", tunings=(tuning,), trials=(*trials, failed), judged=judged)
    return replace(whole, **changes)  # type: ignore[arg-type]


def compared() -> tuple[Row, ...]:
    return tuple(
        Row(policy=policy, outcome=OUTCOMES[policy], run="0", launch=f"comparison {i // 3}", moment_s=10.0 + i)
        for i in range(9)
        for policy in (STOCK, BF16, LAST)
    )


def study_report(objective: Objective = THROUGHPUT, rows: tuple[Row, ...] | None = None) -> StudyReport:
    return study_report_of(record(), compared() if rows is None else rows, objective)


class Page(HTMLParser):
    """What a browser would see: the text of each element by its path, and every tag that was left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

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
    def rows(self) -> list[str]:
        return self.texts("td")


def page(objective: Objective = THROUGHPUT, rows: tuple[Row, ...] | None = None) -> Page:
    found = study_report(objective, rows)
    return Page(page_of(found, findings_of(found)))


def test_the_page_is_whole_and_stands_alone() -> None:
    found = page()
    assert found.open == []
    assert not {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe"}
    assert not [name for _, attributes in found.tags for name in attributes if name in ("src", "href", "onclick")]
    text = page_of(study_report(), ())
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"] * text.count("<svg")
    assert "@import" not in text


def test_nothing_of_the_user_is_taken_for_html() -> None:
    found = page()
    assert found.texts("h1") == ['small <script>alert("x")</script> on NVIDIA H200']
    assert "CUDA <out> of memory & more" in found.rows
    tuning = replace(record().last, batch_size="<b>32</b>")  # type: ignore[arg-type]  # a shared study may hold anything
    assert "<b>" not in page_of(study_report_of(record(tunings=(tuning,)), compared(), THROUGHPUT), ())


def test_the_answer_stands_first_with_what_it_rests_on() -> None:
    found = page()
    sentence, *rest = found.texts("p")[1:]
    assert sentence.startswith("bf16, channels_last: 2.50× [2.4")
    assert rest[0] == "confirmed, over 99.9 % sure, by 10 measurements in 4 processes"
    assert found.texts("span") == ["confirmed"]


def test_an_answer_that_is_not_confirmed_comes_with_the_command_that_measures_more() -> None:
    trials = (*record().trials[:1], replace(record().trials[1], outcome=measured(9.8, 700.0)))
    study = study_report_of(record(trials=trials), (), THROUGHPUT)
    found = Page(page_of(study, findings_of(study)))
    assert found.texts("span") == ["likely"]
    (command,) = found.texts("pre")
    assert command == "amptune tune train.py:small --objective throughput --study runs"


def test_finalists_trials_failures_and_findings_have_their_sections() -> None:
    found = page(Objective("memory"))
    assert found.texts("h2") == [
        "Measured more than once",
        "Throughput and peak memory",
        "Throughput and energy",
        "What each setting buys",
        "Findings",
        "All 6 trials",
        "Failures",
    ]
    assert "peak memory vs. baseline" in found.texts("th")
    assert {"baseline", "AMP recipe"} <= set(found.rows)
    assert "answer" in page().rows
    assert "rejected" in found.rows
    assert "passed, 12% of what is allowed" in found.rows
    assert "train.py:7" in found.rows
    assert any("fp16 cannot win: fc: gradients overflow" in item for item in found.texts("li"))


def test_every_row_is_as_wide_as_its_headings() -> None:
    text = page_of(study_report(Objective("memory")), ())
    for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        headings = table.count("<th>")
        for row in re.findall(r"<tr[^>]*><td.*?</tr>", table):
            spans = [int(span) for span in re.findall(r'colspan="(\d+)"', row)]
            assert row.count("<td") - len(spans) + sum(spans) == headings


def test_the_charts_name_the_answer_the_baseline_and_the_amp_recipe() -> None:
    found = page()
    labels = [text for text in found.texts("text") if ":" in text]
    assert sorted(labels) == sorted(2 * ["answer: bf16, channels_last", "baseline: stock PyTorch", "AMP recipe: bf16"])
    kinds = [attributes["class"] for tag, attributes in found.tags if tag == "g"]
    assert kinds.count("rejected") == 2
    assert kinds.count("winner") == kinds.count("baseline") == 2


def test_without_energy_there_is_one_chart_and_without_comparison_no_table_of_it() -> None:
    trials = tuple(
        replace(trial, outcome=replace(trial.outcome, energy_j_per_sample=None))
        for trial in record().trials
        if isinstance(trial.outcome, Measurement)
    )
    found = Page(page_of(study_report_of(record(trials=trials), (), THROUGHPUT), ()))
    assert found.texts("h2") == ["Throughput and peak memory", "What each setting buys", "All 5 trials"]


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [3.0, 3.1], [1e-4, 2.5e-4], [812.0, 91_000.0], [5e8, 6e8]])
def test_an_axis_holds_all_values_and_has_a_few_round_ticks(values: list[float]) -> None:
    axis = axis_for("x", values, 0.0, 100.0)
    assert all(0.0 < axis.place(value) < 100.0 or value == axis.low for value in values)
    assert 3 <= len(axis.ticks) <= 9
    assert len({axis.text(tick) for tick in axis.ticks}) == len(axis.ticks)
    assert all(axis.low <= tick * 1.000001 and tick <= axis.high * 1.000001 for tick in axis.ticks)


def test_labels_keep_clear_of_each_other_and_of_the_edge() -> None:
    marks = [
        ChartMark(x=1.0, y=1.0, kind="trial", title="t"),
        *(ChartMark(x=9.0, y=5.0 + i / 100, kind="recipe", title="t", label=f"a long label {i}") for i in range(3)),
    ]
    found = Page(scatter(marks, "x", "y"))
    places = [attributes for tag, attributes in found.tags if tag == "text" and "label" in str(attributes.get("class"))]
    heights = sorted(float(str(one["y"])) for one in places)
    assert all(above + 16 < below for above, below in pairwise(heights))
    assert {one["text-anchor"] for one in places} == {"end"}


def test_the_frontier_is_a_staircase_of_what_nothing_beats() -> None:
    spots = [(1.0, 2.0), (2.0, 1.0), (3.0, 5.0), (4.0, 9.0)]
    marks = [ChartMark(x=x, y=y, kind="trial", title="") for x, y in spots[:3]]
    marks.append(ChartMark(x=4.0, y=9.0, kind="rejected", title=""))
    (line,) = (attributes for tag, attributes in Page(scatter(marks, "x", "y")).tags if tag == "polyline")
    corners = [tuple(map(float, corner.split(","))) for corner in str(line["points"]).split()]
    assert len(corners) == 4  # up to (1, 2), along to 3, up to (3, 5), along to the edge
    assert corners[0][1] == corners[1][1] > corners[2][1] == corners[3][1]


def test_a_graph_that_was_rejected_speaks_against_the_others_in_its_dtype_in_a_study_read_back_too() -> None:
    graph = Policy(autocast="bf16", compile="default")
    study = record(judged=(GateRecord(policy=graph, passes=False, used=2.0, words="its gradient holds 20%"),))
    assert study.judgements.bars(replace(graph, compile="reduce-overhead"))
    assert not study.judgements.bars(replace(graph, compile="off"))
    assert not study.judgements.bars(replace(graph, autocast="off"))
