"""The README's code runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import amptune
from amptune.policy.file_io import parse_policy
from amptune.policy.yaml_text import parse

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block_with(language: str, words: str) -> str:
    (found,) = [block for block in blocks(language) if words in block]
    return found


def test_the_workload_of_the_readme_is_one() -> None:
    namespace: dict[str, object] = {}
    exec(block_with("python", "amptune.Workload("), namespace)  # noqa: S102  # our own README
    workload = namespace["workload"]
    assert isinstance(workload, amptune.Workload)
    assert workload.loss is not None
    assert workload.loss(workload.model(), workload.batch(4)).ndim == 0


@pytest.mark.parametrize("autocast", ["off", "bf16", "fp16"])
def test_the_training_loop_of_the_readme_trains(autocast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    amptune.save(amptune.Policy(autocast=autocast, batch_size=8, accumulate=2), "policy.yaml")  # type: ignore[arg-type]
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()

    def loader(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(8):
            yield torch.randn(batch_size, 4), torch.randint(2, (batch_size,))

    names = {
        "amptune": amptune,
        "torch": torch,
        "model": model,
        "loader": loader,
        "loss_fn": nn.functional.cross_entropy,
    }
    exec(block_with("python", "tuned.scaler.scale"), names)  # noqa: S102  # our own README
    assert not torch.equal(model.weight, before)
    names["tuned"].undo()  # type: ignore[attr-defined]  # made by the README


def test_the_policy_shown_is_a_policy() -> None:
    text = block_with("yaml", "schema: amptune.policy/1")
    file = parse_policy(parse(text, "README.md"))
    assert isinstance(file, amptune.PolicyFile)


def test_the_readme_begins_with_the_two_commands() -> None:
    beginning = README[: README.index("## ")]
    assert "make tune" in beginning
    assert "make test" in beginning
