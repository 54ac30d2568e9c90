"""Workloads written from training scripts, as people write these: each file runs as it stands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from amptune.errors import TargetError
from amptune.workload.targets import load_workload, parse_target
from amptune.workload.written_workload import FILL_IN, doubt_of, options_for, workload_text

MAIN = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Linear): ...

def data():
    return TensorDataset(torch.arange(160.).reshape(40, 4) / 160, torch.arange(40) % 3)

def train(model, loader, optimizer):
    for i, batch in enumerate(loader):
        x, y = (part.to("cpu") for part in batch)
        loss = F.cross_entropy(model(x), y)
        (loss / 4).backward()
        if (i + 1) % 4 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()

def main():
    torch.manual_seed(1)
    net = Net(4, 3).to("cpu")
    loader = DataLoader(data(), batch_size=5, shuffle=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    print(net)
    for epoch in range(2):
        train(net, loader, opt)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["amptune"])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("written_"):
            del sys.modules[name]


def text_for(source: str, folder: Path) -> str:
    script = folder / "written_train.py"
    script.write_text(source)
    return workload_text(script, folder / "written_train_workload.py")


def test_a_loops_workload_has_its_parts(tmp_path: Path) -> None:
    (tmp_path / "written_train_workload.py").write_text(text_for(MAIN, tmp_path))
    workload = load_workload(parse_target(str(tmp_path / "written_train_workload.py")))
    model: Any = workload.model()
    x, y = workload.batch(5)
    assert (workload.batch_size, workload.accumulate, workload.clip) == (5, 4, 0.5)
    assert workload.loss is not None
    assert torch.equal(workload.loss(model, (x, y)), cross_entropy(model(x), y))  # in FP32, and not divided
    assert type(workload.optimizer(model)) is torch.optim.SGD


@pytest.mark.parametrize(
    ("source", "options", "doubt"),
    [
        (MAIN, "", None),
        ("args = ArgumentParser().parse_args()\n", " -- ARGUMENTS", None),
        ("with torch.autocast('cuda', dtype=torch.bfloat16): ...\n", " --baseline amp-bf16", None),
        (
            "with torch.autocast('cuda', dtype=torch.bfloat16, enabled=args.amp): ...\n",
            "",
            "if args.amp is true in your training, add --baseline amp-bf16",
        ),
        (
            "parser = ArgumentParser()\nparser.add_argument('corpus')\nparser.add_argument('rest', nargs='*')\n"
            "parser.add_argument('-d', '--data', required=True)\nparser.add_argument('--lr', default=1)\n",
            " -- CORPUS --data DATA",
            None,
        ),
    ],
)
def test_todays_precision_and_arguments_are_part_of_the_next_line(
    source: str, options: str, doubt: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert (options_for(script), doubt_of(script)) == (options, doubt)


TRAINERS = [
    (
        "def main(seed=3):\n    args = TrainingArguments('out')\n    args.weight_decay = 0.1\n"
        "    trainer = Trainer(Net(seed), args)\n    trainer.train()\n    trainer.save_model()\n",
        "    seed = 3\n    args = TrainingArguments('out')\n    args.weight_decay = 0.1\n"
        "    trainer = Trainer(Net(seed), args)\n    return amptune.Workload.from_trainer(trainer, ",
    ),
    (
        "model, loader = Lit(), Data()\ntrainer = L.Trainer(accumulate_grad_batches=2, gradient_clip_val=1.0)\n"
        "trainer.fit(model, datamodule=loader)\n",
        "workload = amptune.Workload.from_lightning(model, loader, accumulate=2, clip=1.0, ",
    ),
]


@pytest.mark.parametrize(("source", "workload"), TRAINERS, ids=["transformers", "lightning"])
def test_a_trainers_workload_is_made_of_the_trainer(source: str, workload: str, tmp_path: Path) -> None:
    assert f'{workload}name="written_train")\n' in text_for(source, tmp_path)


def test_what_the_script_does_not_tell_is_a_line_to_fill_in(tmp_path: Path) -> None:
    text = text_for(MAIN.replace("def main():", "def main(width):").replace("Net(4, 3)", "Net(4, width)"), tmp_path)
    lines = [line.strip() for line in text.splitlines() if FILL_IN in line]
    assert lines == [f"width = ...  {FILL_IN}: written_train.py does not say what it is"]


REFUSED = [
    ("print('hello')\n", "written_train.py shows no training that amptune recognises"),
    ("for :::\n", "written_train.py:1: invalid syntax"),
    (MAIN.replace("optimizer.step()", "pass"), "this loop has no optimizer's step()"),
]


@pytest.mark.parametrize(("source", "said"), REFUSED)
def test_what_is_not_recognised_is_told(source: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        text_for(source, tmp_path)
    assert said in str(caught.value)
