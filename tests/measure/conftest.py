"""What holds for every test that measures."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _collecting_garbage_is_quick() -> Iterator[None]:
    """The bench does so after every look, and the libraries' own objects are many."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _the_generator_is_put_back() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
