"""The harness holds what it should, and lets nothing pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from frozen import __main__ as program
from frozen.decisions import CASES, VARIANTS, decided, told

# These take seconds; the decisions take a minute or two, in `make frozen`.
QUICK = ["help.txt", "errors.txt", "answers.txt", "json.txt", "names.txt", "texts.txt", "tensors.txt", "schemas"]


def test_the_tree_does_what_is_recorded() -> None:
    assert program.held(QUICK) == 0


def test_the_first_decision_is_as_recorded() -> None:
    case = CASES[0]
    recorded = program._expected()[f"decisions/{case.workload}.txt"]
    assert recorded.startswith(f"== {case.title}\n{decided(case)}\n")


def test_there_are_two_hundred_decisions_of_all_kinds() -> None:
    assert len(CASES) >= 200
    assert len({case.seed for case in CASES}) == len(CASES)
    assert {case.variant for case in CASES} == set(VARIANTS)
    pages = program._expected()
    assert sum(page.count("== ") for name, page in pages.items() if name.startswith("decisions/")) == len(CASES)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recording of a small page."""
    (tmp_path / "RECORDED").mkdir()
    monkeypatch.setattr(program, "RECORDED", tmp_path / "RECORDED")
    (tmp_path / "RECORDED" / "versions.txt").write_text("numpy 1\n")
    (tmp_path / "RECORDED" / "page.txt").write_text("one\ntwo\nthree\n")
    return tmp_path


def says(monkeypatch: pytest.MonkeyPatch, **pages: str) -> None:
    def found(wanted: Sequence[str] = ()) -> dict[str, str]:
        return {f"{name}.txt": text for name, text in pages.items() if program._is_wanted(name, wanted)}

    monkeypatch.setattr(program, "found", found)


def test_a_difference_is_printed_and_fails(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recorded.exists()
    says(monkeypatch, page="one\n2\nthree\n")
    assert program.held([]) == 1
    out, err = capsys.readouterr()
    assert "-two\n+2\n" in out
    assert "1 of 1 pages differ: page.txt" in err
    assert "recorded with numpy 1" in err


def test_a_page_that_is_gone_fails(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded.exists()
    says(monkeypatch)
    assert program.held([]) == 1


def test_a_change_made_on_purpose_is_recorded(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, page="one\n2\nthree\nfour\n", new="a page\n")
    assert program.held([]) == 1
    assert program.record(["new"]) == 0
    assert [program.held(["new"]), program.held([])] == [0, 1]
    assert program.record([]) == 0
    assert program.held([]) == 0
    says(monkeypatch, page="one\n")
    assert program.record([]) == 0
    assert {path.name for path in (recorded / "RECORDED").iterdir()} == {"page.txt", "versions.txt"}


def test_a_policy_is_told_by_what_departs_from_stock() -> None:
    from frozen.adapter import STOCK, Fp32Rule, Policy

    assert told(STOCK) == "stock"
    policy = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="head", cast_output=True),), batch_size=4)
    assert told(policy) == "autocast=bf16 fp32_modules=[path:head+cast_output:True] batch_size=4"


def test_only_the_adapter_names_inner_modules() -> None:
    tests = Path(program.__file__).parents[1]
    sources = [path for room in ("frozen", "simulated") for path in (tests / room).glob("*.py")]
    named = {path.name for path in sources if re.search(r"^\s*(from|import) amptune\.", path.read_text(), re.MULTILINE)}
    assert named == {"adapter.py"}


@pytest.mark.slow
def test_the_starting_commit_decides_what_it_is_asked_today(tmp_path: Path) -> None:
    if not program.has_start():
        pytest.skip("this clone does not have the starting commit")
    out = tmp_path / "told.txt"
    line = [sys.executable, "-m", "frozen", "replay", "--start", "--tunings", "1", "--budget", "40", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(program.HERE.parent)}
    done = subprocess.run(line, cwd=program.REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    assert f"amptune of {program.checkout()}" in done.stderr
    assert out.read_text().startswith("== conv1, seed 0, 40 s, throughput, own space\npolicy: ")
