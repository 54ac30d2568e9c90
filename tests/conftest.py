"""What holds for every test: how many threads compute, how long examples may take, and what is put back behind it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Tests run beside each other: one thread each, or they wait for one another. Before torch and numpy are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

# A slow machine is no bug. In `make test` the examples are the same in every run; HYPOTHESIS_PROFILE=new draws others.
SLOW_IS_FINE = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=SLOW_IS_FINE)
hypothesis.settings.register_profile("new", deadline=None, suppress_health_check=SLOW_IS_FINE)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def _collecting_garbage_is_quick() -> Iterator[None]:
    """The bench does so after every look, and the libraries' own objects are many."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_policy_outlives_its_test() -> Iterator[None]:
    """A model that a test dropped under its policy is frozen garbage above, and would be told of the next policies."""
    yield
    if "amptune.runtime.apply_policy" in sys.modules:
        sys.modules["amptune.runtime.apply_policy"]._under_a_policy.clear()
        sys.modules["amptune.changes.flags"]._held.clear()


@pytest.fixture(autouse=True)
def _random_numbers_are_the_same_whatever_ran_before() -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script of small workloads, in which a user runs commands."""
    from commands import WORKLOADS

    (tmp_path / "train.py").write_text(WORKLOADS)
    return tmp_path
