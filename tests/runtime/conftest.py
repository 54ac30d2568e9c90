from __future__ import annotations

import pytest
import recorded_training


@pytest.fixture(autouse=True)
def _afresh() -> None:
    recorded_training.forwards.clear()
    recorded_training.said.clear()
