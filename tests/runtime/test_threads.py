"""`threads`: how many of a CPU's threads share an operation, in training and in a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated.recorded import RecordedEvaluator
from torch import nn

import amptune
from amptune.policy.settings import Policy
from amptune.search.space.narrowed_space import narrowed
from amptune.search.space.space_file import load_space

SPACE = """
schema: amptune.space/1
architecture: mine
compute_capability: []
extends: cpu
knobs: {threads: [0, 32, 16, 8, 4, 2, 1]}
"""


@pytest.fixture(autouse=True)
def _a_process_of_three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [0, 2, 3, 8])
def test_a_policy_takes_fewer_threads_and_never_more_until_it_is_undone(threads: int) -> None:
    with amptune.apply(Policy(threads=threads), nn.Linear(2, 2)) as tuned:
        assert torch.get_num_threads() == (2 if threads == 2 else 3)
        said = ["threads 8: PyTorch takes 3 in this process, and goes on with these"]  # of a machine with more cores
        assert [finding.message for finding in tuned.findings] == said * (threads == 8)
        if threads != 2:
            torch.set_num_threads(1)  # the user's own wish, which undoing leaves alone
    assert torch.get_num_threads() == (3 if threads == 2 else 1)
    tuned = amptune.apply(Policy(threads=2), nn.Linear(2, 2, device="meta"))
    assert [finding.message for finding in tuned.findings] == ["threads is for a CPU, and the model is on meta"]
    tuned.undo()


@pytest.mark.parametrize(("own", "tried"), [(1, ()), (2, (0, 1)), (12, (0, 8, 4, 2, 1)), (0, ())])
def test_a_space_of_ones_own_tries_fewer_than_pytorch_takes(own: int, tried: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SPACE)
    subject = replace(RecordedEvaluator("small").prepare(1.0).subject, threads=own)
    space, _ = narrowed(load_space(tmp_path / "mine.yaml"), subject, {}, compiling=False)
    assert space.choices("threads") == tried
    pinned, _ = narrowed(load_space("cpu"), subject, {"threads": "3"}, compiling=False)
    assert pinned.choices("threads") == (3,), "it may be pinned where the space leaves it out"
