"""The harness holds what it should, and lets nothing pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from frozen import __main__ as program
from frozen.decisions import CASES, QUICK, TRACED, VARIANTS, rows_of

# These take seconds; all decisions take minutes, in `make frozen`.
PAGES = ["help.txt", "errors.txt", "answers.txt", "json.txt", "names.txt", "texts.txt", "tensors.txt", "schemas"]


def test_the_tree_does_what_is_recorded() -> None:
    assert program.held(PAGES) == 0


def test_some_tunings_decide_as_recorded() -> None:
    chosen = [case for case in CASES if case.seed in QUICK]
    recorded = program.expected_pages()["decisions.txt"].splitlines()
    assert rows_of(chosen).splitlines()[1:] == [recorded[1 + case.seed] for case in chosen]


def test_all_kinds_of_tunings_are_recorded() -> None:
    assert [case.seed for case in CASES] == list(range(210))
    assert {case.variant for case in CASES} == set(VARIANTS)
    pages = program.expected_pages()
    assert len(pages["decisions.txt"].splitlines()) == 1 + len(CASES)
    assert pages["traces.txt"].count("== ") == len(TRACED) == 10
    assert {CASES[seed].variant for seed in TRACED} == set(VARIANTS)


def says(monkeypatch: pytest.MonkeyPatch, **pages: str) -> None:
    def found(wanted: Sequence[str] = ()) -> dict[str, str]:
        return {f"{name}.txt": text for name, text in pages.items() if program._is_wanted(name, wanted)}

    monkeypatch.setattr(program, "found", found)


def test_a_difference_is_printed_and_fails_until_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "RECORDED", tmp_path)
    (tmp_path / "versions.txt").write_text("numpy 1\n")
    (tmp_path / "page.txt").write_text("one\ntwo\nthree\n")
    says(monkeypatch, page="one\n2\nthree\n", new="a page\n")
    assert program.held([]) == 1
    out, err = capsys.readouterr()
    assert "-two\n+2\n" in out
    assert "2 of 2 pages differ: new.txt, page.txt" in err
    assert [program.record(["new"]), program.held(["new"]), program.held([])] == [0, 0, 1]
    assert [program.record([]), program.held([])] == [0, 0]
    says(monkeypatch, page="one\n")
    assert program.held(["new"]) == 1, "a page that is gone"
    assert program.record([]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"page.txt", "versions.txt"}
