"""A folder with a script of small workloads, in which a user runs commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import WORKLOADS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(WORKLOADS)
    return tmp_path
