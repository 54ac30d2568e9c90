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
from amptune.workload.workload import Workload
from amptune.workload.written_workload import FILL_IN, doubt_of, options_for, workload_text

HEAD = """
import argparse
import click
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.net(x)

def data():
    return TensorDataset(torch.arange(160.).reshape(40, 4) / 160, torch.arange(40) % 3)
"""

MAIN = """
def main():
    device = torch.device("cpu")
    loader = DataLoader(data(), batch_size=5, shuffle=True)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    print(model)
    for epoch in range(2):
        for i, batch in enumerate(loader):
            x, y = (part.to(device) for part in batch)
            loss = F.cross_entropy(model(x), y)
            (loss / 4).backward()
            if (i + 1) % 4 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

if __name__ == "__main__":
    main()
"""

# PyTorch's examples: arguments, and a function for an epoch.
EPOCHS = """
def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        if args.dry_run:
            break

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    options = {"shuffle": True}
    if args.batch_size > 1:
        options.update({"batch_size": args.batch_size})
    loader = DataLoader(data(), **options)
    net = Net(width=16).to("cpu")
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    for epoch in range(2):
        train(args, net, "cpu", loader, optimizer, epoch)

if __name__ == "__main__":
    main()
"""

LOOPS = {"main": (MAIN, 4, 0.5), "epochs": (EPOCHS, 1, None)}


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["amptune"])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("written_"):
            del sys.modules[name]


def text_for(source: str, folder: Path, name: str = "written_train") -> str:
    script = folder / f"{name}.py"
    script.write_text(source)
    return workload_text(script, folder / f"{name}_workload.py")


def written(source: str, folder: Path, name: str = "written_train") -> Workload:
    file = folder / f"{name}_workload.py"
    file.write_text(text_for(source, folder, name))
    return load_workload(parse_target(str(file)))


@pytest.mark.parametrize(("source", "accumulate", "clip"), LOOPS.values(), ids=LOOPS)
def test_a_loops_workload_has_its_parts(source: str, accumulate: int, clip: float | None, tmp_path: Path) -> None:
    workload = written(HEAD + source, tmp_path)
    model: Any = workload.model()
    x, y = workload.batch(5)
    assert (workload.batch_size, workload.accumulate, workload.clip) == (5, accumulate, clip)
    assert workload.loss is not None
    assert torch.equal(workload.loss(model, (x, y)), cross_entropy(model(x), y))  # in FP32, and not divided
    optimizer: Any = workload.optimizer(model)
    assert sum(map(len, (group["params"] for group in optimizer.param_groups))) == 4


def test_a_script_with_arguments_gets_those_behind_two_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--batch-size", "10"])
    assert written(HEAD + EPOCHS, tmp_path).batch_size == 10


@pytest.mark.parametrize(
    ("source", "options", "doubt"),
    [
        (MAIN, "", None),
        (EPOCHS, " -- ARGUMENTS", None),
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


TUNED = {
    "model = Net().to(device)\n": 'model = Net().to(device)\n    tuned = amptune.apply("policy.yaml", model)\n',
    "torch.optim.SGD(model.parameters(), lr=0.1)": "tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))",
    "            loss = F.cross_entropy(model(x), y)\n": "            with tuned.autocast():\n"
    "                loss = F.cross_entropy(tuned.model(tuned.batch(x)), y)\n",
    "(loss / 4).backward()": "tuned.scaler.scale(loss / 4).backward()",
    "optimizer.step()": "tuned.scaler.step(optimizer)",
}


def test_a_script_that_applies_a_policy_gives_the_workload_that_it_gave_before(tmp_path: Path) -> None:
    tuned = MAIN
    for before, after in TUNED.items():
        assert before in tuned
        tuned = tuned.replace(before, after)
    assert text_for(HEAD + "import amptune\n" + tuned, tmp_path) == text_for(HEAD + MAIN, tmp_path)


def test_what_the_script_does_not_tell_is_a_line_to_fill_in(tmp_path: Path) -> None:
    text = text_for(HEAD + MAIN.replace("def main():", "def main(width):").replace("Net()", "Net(width)"), tmp_path)
    lines = [line.strip() for line in text.splitlines() if FILL_IN in line]
    assert lines == [f"width = ...  {FILL_IN}: written_train.py does not say what it is"]


REFUSED = {
    "nothing trains": ("print('hello')\n", "written_train.py shows no training that amptune recognises"),
    "no Python": ("for :::\n", "written_train.py:1: invalid syntax"),
    "no optimizer": (HEAD + MAIN.replace("optimizer.step()", "pass"), "this loop has no optimizer's step()"),
    "an object's attributes": (
        "class Runner:\n    def run(self):\n        for x in self.loader:\n            self.model(x).backward()\n",
        "written_train.py:4: Runner.run trains attributes of an object, which amptune does not follow",
    ),
}


@pytest.mark.parametrize(("source", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_recognised_is_told(source: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        text_for(source, tmp_path)
    assert said in str(caught.value)
