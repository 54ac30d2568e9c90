"""The example of a report in the docs is what its program writes from the raw samples."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "reports"))  # programs, no package

import example_page


def words_of(page: str) -> str:
    """The page without its figures, whose last digit may depend on the version of a library."""
    return re.sub(r"[\d.,]+", "#", page)


def test_the_example_in_the_docs_is_what_the_program_writes() -> None:
    assert words_of(example_page.PAGE.read_text(encoding="utf-8")) == words_of(example_page.page())


def test_the_program_says_that_a_page_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example_page, "PAGE", tmp_path / "page.html")
    monkeypatch.setattr(sys, "argv", ["example_page.py", "--check"])
    assert example_page.main() == 1
    assert "`python reports/example_page.py` writes it" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["example_page.py"])
    assert example_page.main() == 0
    monkeypatch.setattr(sys, "argv", ["example_page.py", "--check"])
    assert example_page.main() == 0
