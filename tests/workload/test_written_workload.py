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

# Mixed precision, a step in a function of its own, a progress bar; what it needs is made where the script is imported.
SCALED = """
tqdm = lambda loader: loader
net, criterion = Net(), nn.CrossEntropyLoss()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=False)
loader = DataLoader(data(), batch_size=5)

def train_step(net, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(net(x), y)
    scaler.scale(loss).backward()

def fit():
    bar = tqdm(loader)
    for step, (x, y) in enumerate(bar):
        train_step(net, x, y)
        if step % 4 == 3:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(opt)
            opt.zero_grad()

if __name__ == "__main__":
    fit()
"""

# Importing it trains; no loader, but a function that draws; a loop over the parts of a step.
DRAWS = """
args = argparse.Namespace(accumulate=4, batch=5)
x_all, y_all = data().tensors
torch.manual_seed(1337)

def get_batch(split):
    drawn = torch.randint(len(x_all), (args.batch,))
    return x_all[drawn], y_all[drawn]

context = torch.autocast("cpu", dtype=torch.bfloat16)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
X, Y = get_batch("train")
while True:
    for micro_step in range(args.accumulate):
        with context:
            logits = model(X)
            loss = F.cross_entropy(logits, Y)
            loss = loss / args.accumulate
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    raise SystemExit("this script trained")
"""

# Importing it trains, with an iterator in place of a loop over the loader, and the loss within the backward pass.
ITERATES = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = iter(DataLoader(data(), 5))
for step in range(3):
    xb, yb = next(batches)
    optimizer.zero_grad()
    F.cross_entropy(model(xb), yb).backward()
    optimizer.step()
raise SystemExit("this script trained")
"""

# click, and a progress bar that a block makes.
DECORATED = """
def tqdm(loader, unit): ...

@click.command()
@click.option("--batch-size", default=5)
@click.option("--width", type=int, default=8)
def main(batch_size, width):
    model = Net(width)
    loader = DataLoader(data(), batch_size)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        with tqdm(loader, unit="batch") as bar:
            for inputs, labels in bar:
                inputs = inputs.cuda(non_blocking=True)
                labels = labels.cuda(non_blocking=True)
                loss = F.cross_entropy(model(inputs), labels)
                opt.zero_grad()
                loss.backward()
                opt.step()
                bar.set_postfix(loss=loss.item())

if __name__ == "__main__":
    main()
"""

ACCUMULATES = {"main": MAIN, "scaled": SCALED, "draws": DRAWS}
ACCUMULATES["divides where the loss is made"] = MAIN.replace("model(x), y)", "model(x), y) / 4").replace(
    "(loss / 4).backward()", "loss.backward()"
)
LOOPS = {**ACCUMULATES, "epochs": EPOCHS, "iterates": ITERATES, "decorated": DECORATED}


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


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_a_loops_workload_has_its_model_batches_loss_and_optimizer(source: str, tmp_path: Path) -> None:
    workload = written(HEAD + source, tmp_path)
    model: Any = workload.model()
    x, y = workload.batch(5)
    assert workload.batch_size == 5
    assert workload.loss is not None
    assert torch.equal(workload.loss(model, (x, y)), cross_entropy(model(x), y))  # in FP32, and not divided
    optimizer: Any = workload.optimizer(model)
    assert sum(map(len, (group["params"] for group in optimizer.param_groups))) == 4


@pytest.mark.parametrize("source", ACCUMULATES.values(), ids=ACCUMULATES)
def test_accumulation_and_clipping_are_the_loops(source: str, tmp_path: Path) -> None:
    workload = written(HEAD + source, tmp_path)
    assert (workload.accumulate, workload.clip) == (4, 0.5)


def test_definitions_are_imported_if_importing_does_not_train(tmp_path: Path) -> None:
    text = text_for(HEAD + MAIN, tmp_path)
    assert "from written_train import Net, data\n" in text
    assert "class Net" not in text
    assert "scheduler" not in text
    assert "print" not in text


def test_a_script_with_arguments_gets_those_behind_two_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--batch-size", "10"])
    assert written(HEAD + EPOCHS, tmp_path).batch_size == 10


def test_todays_precision_and_arguments_are_part_of_the_next_line(tmp_path: Path) -> None:
    expected = {MAIN: "", EPOCHS: " -- ARGUMENTS", SCALED: " --baseline amp-bf16"}
    for source, options in expected.items():
        (tmp_path / "train.py").write_text(HEAD.replace("import argparse", "") + source)
        assert options_for(tmp_path / "train.py") == options


def test_arguments_that_a_script_must_be_given_stand_in_the_next_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "parser = ArgumentParser()\nparser.add_argument('corpus')\nparser.add_argument('rest', nargs='*')\n"
        "parser.add_argument('-d', '--data', required=True)\nparser.add_argument('--lr', default=1)\n"
    )
    assert options_for(tmp_path / "train.py") == " -- CORPUS --data DATA"


def test_mixed_precision_that_an_option_decides_is_no_baseline_but_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("with torch.autocast('cuda', dtype=torch.bfloat16, enabled=args.amp): ...\n")
    assert (options_for(script), doubt_of(script)) == (
        "",
        "if args.amp is true in your training, add --baseline amp-bf16",
    )
    script.write_text("with torch.autocast('cuda', dtype=torch.bfloat16, enabled=True): ...\n")
    assert (options_for(script), doubt_of(script)) == (" --baseline amp-bf16", None)


TRAINER = """
from transformers import Trainer, TrainingArguments, set_seed
from corpus import tokens

def main(seed=3):
    set_seed(seed)
    model = build(seed)
    print(model)
    args = TrainingArguments("out")
    args.weight_decay = 0.1
    trainer = Trainer(model, args, train_dataset=tokens)
    trainer.train()
    trainer.save_model()

def build(seed): ...

if __name__ == "__main__":
    main()
"""

TRAINER_WORKLOAD = """
from transformers import Trainer, TrainingArguments
from corpus import tokens

import amptune
from written_train import build


def workload() -> amptune.Workload:
    seed = 3
    model = build(seed)
    args = TrainingArguments("out")
    args.weight_decay = 0.1
    trainer = Trainer(model, args, train_dataset=tokens)
    return amptune.Workload.from_trainer(trainer, name="written_train")
"""


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    assert text_for(TRAINER, tmp_path).endswith(TRAINER_WORKLOAD)


LIGHTNING = """
import lightning as L
from mine import Lit, Data

if __name__ == "__main__":
    limit = 1.0
    model, loader = Lit(), Data()
    trainer = L.Trainer(accumulate_grad_batches=2, gradient_clip_val=limit, logger=False)
    FIT
    trainer.test(model)
"""


@pytest.mark.parametrize(
    ("fit", "arguments"),
    [
        ("trainer.fit(model, loader, val)", "(model, loader, accumulate=2, clip=limit"),
        ("trainer.fit(model, datamodule=loader)", "(model, loader, accumulate=2, clip=limit"),
        ("trainer.fit(model=model)", "(model, accumulate=2, clip=limit"),
    ],
)
def test_a_lightning_module(fit: str, arguments: str, tmp_path: Path) -> None:
    text = text_for(LIGHTNING.replace("FIT", fit), tmp_path)
    assert f'    return amptune.Workload.from_lightning{arguments}, name="written_train")\n' in text.replace(
        "\n        ", ""
    )
    assert "Trainer" not in text


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


def test_a_step_by_a_policy_clips_and_steps_as_the_loop_did(tmp_path: Path) -> None:
    clipped = "nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)\n                optimizer.step()"
    tuned = MAIN.replace(clipped, "tuned.step(optimizer, clip=0.5)")
    for before, after in TUNED.items():
        tuned = tuned.replace(before, after)
    assert "tuned.step(optimizer, clip=0.5)" in tuned
    assert text_for(HEAD + "import amptune\n" + tuned, tmp_path) == text_for(HEAD + MAIN, tmp_path)


def test_a_policy_that_is_handed_to_a_function_is_left_out_too(tmp_path: Path) -> None:
    tuned = EPOCHS
    for before, after in {
        "model, device, train_loader": "tuned, device, train_loader",
        "model.train()": "tuned.model.train()",
        "output = model(data)": "output = tuned.model(tuned.batch(data))",
        "loss.backward()": "tuned.scaler.scale(loss).backward()",
        "optimizer.step()": "tuned.scaler.step(optimizer)\n        tuned.scaler.update()",
        'to("cpu")\n': 'to("cpu")\n    tuned = amptune.apply("policy.yaml", net)\n',
        "train(args, net": "train(args, tuned",
    }.items():
        assert before in tuned
        tuned = tuned.replace(before, after)
    workload = written(HEAD + "import amptune\n" + tuned, tmp_path)
    model: Any = workload.model()
    x, y = workload.batch(5)
    assert workload.loss is not None
    assert torch.equal(workload.loss(model, (x, y)), cross_entropy(model(x), y))


def test_what_the_script_does_not_tell_is_a_line_to_fill_in(tmp_path: Path) -> None:
    text = text_for(HEAD + MAIN.replace("def main():", "def main(width):").replace("Net()", "Net(width)"), tmp_path)
    lines = [line.strip() for line in text.splitlines() if FILL_IN in line]
    assert lines == [f"width = ...  {FILL_IN}: written_train.py does not say what it is"]


REFUSED = {
    "nothing trains": ("print('hello')\n", "written_train.py shows no training that amptune recognises"),
    "no Python": ("for :::\n", "written_train.py:1: invalid syntax"),
    "several optimizers": (
        HEAD + MAIN.replace("scheduler.step()", "other.step()"),
        "written_train.py:28: this loop has steps of optimizer, other",
    ),
    "no optimizer": (HEAD + ITERATES.replace("optimizer.step()", "pass"), "this loop has no optimizer's step()"),
    "an object's attributes": (
        "class Runner:\n    def run(self):\n        for x in self.loader:\n            self.model(x).backward()\n",
        "written_train.py:4: Runner.run trains attributes of an object, which amptune does not follow",
    ),
    "no loop": ("loss = model(x)\nloss.backward()\n", "written_train.py:2: backward() stands in no loop"),
}


@pytest.mark.parametrize(("source", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_recognised_is_told(source: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        text_for(source, tmp_path)
    assert said in str(caught.value)
