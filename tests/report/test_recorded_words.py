"""Policies of earlier tunings are explained in the words that the recorded page has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from amptune.policy.file_io import load
from amptune.report.explanation import explain

FROZEN = Path(__file__).resolve().parents[1] / "frozen"
PAGE = (FROZEN / "recorded" / "answers.txt").read_text()
EXPLAINED = re.findall(r"^\$ amptune explain (\S+)\nexit 0\n-- stdout\n(.*?)\n\n(?=\$ |\Z)", PAGE, re.M | re.S)


assert len(EXPLAINED) > 10


@pytest.mark.parametrize(("file", "said"), EXPLAINED)
def test_a_file_is_explained_as_recorded(file: str, said: str) -> None:
    shown = said.splitlines()
    for heading, sentences in explain(load(FROZEN / file)).items():
        at = shown.index(heading) + 1
        assert [f"  {line}".rstrip() for line in "\n".join(sentences).splitlines()] == shown[at : at + len(sentences)]
