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
from amptune.errors import FileFormatError
from amptune.policy.file_io import parse_policy
from amptune.policy.settings import STOCK, Policy
from amptune.policy.yaml_text import parse
from amptune.report.explanation import explain
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


def test_a_policy_takes_fewer_threads_until_it_is_undone() -> None:
    with amptune.apply(Policy(threads=2), nn.Linear(2, 2)) as tuned:
        assert torch.get_num_threads() == 2
        assert not tuned.findings
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("threads", [0, 3, 8])
def test_no_policy_takes_more_than_pytorch_does(threads: int) -> None:
    """A file may come from a machine of the same name with more cores."""
    with amptune.apply(Policy(threads=threads), nn.Linear(2, 2)) as tuned:
        assert torch.get_num_threads() == 3
        said = ["threads 8: PyTorch takes 3 in this process, and goes on with these"] if threads == 8 else []
        assert [finding.message for finding in tuned.findings] == said
        torch.set_num_threads(1)  # the user's own wish, which undoing leaves alone
    assert torch.get_num_threads() == 1


def test_a_model_on_a_device_does_not_care() -> None:
    tuned = amptune.apply(Policy(threads=2), nn.Linear(2, 2, device="meta"))
    assert [finding.message for finding in tuned.findings] == ["threads is for a CPU, and the model is on meta"]
    tuned.undo()


def test_a_file_has_it(tmp_path: Path) -> None:
    amptune.save(Policy(threads=4), tmp_path / "policy.yaml")
    loaded = amptune.load(tmp_path / "policy.yaml")
    assert loaded.policy == Policy(threads=4)
    assert str(loaded.policy) == "threads 4"
    assert "threads 4: so many CPU threads share an operation." in explain(loaded)
    amptune.save(STOCK, tmp_path / "stock.yaml")
    assert "threads" not in (tmp_path / "stock.yaml").read_text()
    with pytest.raises(FileFormatError, match="threads: -1 is not at least 0"):
        parse_policy(parse("schema: amptune.policy/1\nthreads: -1", "x.yaml"))


@pytest.mark.parametrize(("own", "tried"), [(1, ()), (2, (0, 1)), (12, (0, 8, 4, 2, 1)), (0, ())])
def test_a_space_of_ones_own_tries_fewer_than_pytorch_takes(own: int, tried: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SPACE)
    subject = replace(RecordedEvaluator("small").prepare(1.0).subject, threads=own)
    space, _ = narrowed(load_space(tmp_path / "mine.yaml"), subject, {}, compiling=False)
    assert space.choices("threads") == tried
    pinned, _ = narrowed(load_space("cpu"), subject, {"threads": "3"}, compiling=False)
    assert pinned.choices("threads") == (3,), "it may be pinned where the space leaves it out"
