"""The page in headless Chromium: nothing is asked for, nothing sticks out, everything can be read. Skips without it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies import compared, record, rich

from amptune.report.page import page_of, page_without_answer
from amptune.search.decide.study_report import StudyReport, findings_of, study_report_of
from amptune.search.sampler.records import StudyRecord
from amptune.search.table.objective import THROUGHPUT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this system"),
]

# What the browser finds in a page within a frame, as JSON. Texts are the text nodes that a reader sees.
LOOK = (Path(__file__).parent / "look.js").read_text()
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example-report.html"


def seen(page: str, folder: Path, width: int, *, dark: bool, scripts: bool = True) -> dict[str, Any]:
    """What Chromium sees of the page, `width` pixels wide; `console` is what it logs."""
    sandbox = "" if scripts else 'sandbox="allow-same-origin" '
    style = f"border:0;width:{width}px;height:900px"
    frame = f'<iframe {sandbox}style="{style}" srcdoc="{html.escape(page)}"></iframe>'
    around = f"<!doctype html><body>{frame}<pre></pre><script>{LOOK}</script>"
    (folder / "around.html").write_text(around, encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--hide-scrollbars",
            "--enable-logging=stderr",            "--virtual-time-budget=5000", f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", (folder / "around.html").as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    (found,) = re.findall(r"<pre>(\{.*?\})</pre>", done.stdout, re.DOTALL)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(html.unescape(found)), "console": console}


def of(study: StudyRecord) -> str:
    found: StudyReport = study_report_of(replace(study, rows=(*study.rows, *compared())), THROUGHPUT)
    return page_of(found, findings_of(found))


PAGES: dict[str, Callable[[], str]] = {
    "all that a study may keep": lambda: of(rich()),
    "the baseline alone": lambda: of(record(trials=record().trials[:1], judged=())),
    "everything failed": lambda: page_without_answer(record(trials=record().trials[-1:]), "the baseline failed"),
    "the example in the docs": lambda: EXAMPLE.read_text(encoding="utf-8"),
}
SECTIONS = ["verdict", "policy", "settings", "trials", "numerics", "findings"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_can_be_read(tmp_path: Path, name: str, width: int, dark: bool) -> None:
    found = seen(PAGES[name](), tmp_path, width, dark=dark)
    assert (found["sections"], found["isDark"], found["scrolls"]) == (SECTIONS, dark, width)
    wrong = ("console", "requests", "wide", "faint", "small", "overlapping", "hidden_tips")
    assert {kind: found[kind] for kind in wrong if found[kind]} == {}


def test_the_page_is_whole_without_scripts_and_sorts_with_them(tmp_path: Path) -> None:
    page = of(rich())
    without, with_scripts = (seen(page, tmp_path, 1280, dark=False, scripts=scripts) for scripts in (False, True))
    assert without["sections"] == SECTIONS
    assert without["words"] == with_scripts["words"]
    assert not without["sorted"]
    assert with_scripts["sorted"]


def test_the_look_can_fail(tmp_path: Path) -> None:
    broken = (
        '<section id="x"><p style="color:#999;background:#aaa">faint</p><p style="font-size:9px">small</p>'
        '<div style="width:2000px">wide</div><img src="http://127.0.0.1:9/x.png">'
        '<script>console.error("no"); nothing()</script>'
        '<div class="area"><span class="label">one</span></div><style>.label { position: absolute; top: 9px }</style>'
        '<div class="area"><span class="label">over</span><span class="label">over</span></div></section>'
    )
    found = seen(broken, tmp_path, 390, dark=True)
    assert all(found[kind] for kind in ("console", "requests", "wide", "faint", "small", "overlapping"))
    assert found["scrolls"] > 390
    assert not found["isDark"]
