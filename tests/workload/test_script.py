"""What the text of a target tells: whether it is a script, what it imports, and how its framework takes a policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from amptune.errors import TargetError
from amptune.search.request import source_of
from amptune.workload.script import imports_of, line_for_training
from amptune.workload.targets import load_workload, parse_target


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("loss(model).backward()\noptimizer.step()\n", True),
        ("import amptune\nprint(amptune.Workload)\n", True),
        ("def main():\n    workload = amptune.Workload.from_loop(m, l, o, s)\n", True),
        ("def (", True),
        ("workload = amptune.Workload(model=model)\n", False),
        ("task: Workload = Workload.from_trainer(trainer)\n", False),
        ("def workload():\n    ...\n", False),
        ("def other() -> amptune.Workload:\n    ...\n", False),
        ("from mine import workload\n", False),
    ],
)
def test_a_file_is_a_script_unless_it_makes_a_workload_at_its_top_level(
    source: str, tmp_path: Path, *, runs: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert source_of(str(path)).is_script == runs
    assert source_of(str(path), ["--lr", "1"]).is_script, "with arguments it is one"
    assert not source_of(f"{path}:workload", ["--lr", "1"]).is_script


def test_a_workload_s_file_that_trains_when_it_is_imported_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nweight = torch.nn.Parameter(torch.ones(1))\nsgd = torch.optim.SGD([weight])\n"
        "weight.sum().backward()\nsgd.step()\n"
    )
    with pytest.raises(TargetError, match=r"train.py trains when it is imported.*amptune tune train.py -- its"):
        load_workload(parse_target(f"{path}:workload"))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "Workload.from_trainer(trainer)",
            'TrainingArguments(**training_arguments("p.yaml", …)) and Trainer(callbacks=[PolicyCallback("p.yaml")])',
        ),
        ("Workload.from_lightning(module)", 'Trainer(plugins=[PolicyPrecision("p.yaml")])'),
        ("Workload.from_loop(model, loader, loss, optimizer)", None),
        ("Workload.from_loop(m, l, o, s)\nWorkload.from_trainer(trainer)", None),
    ],
)
def test_the_line_for_training_is_that_of_the_framework(source: str, line: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source)
    assert line_for_training(f"{tmp_path / 'train.py'}:workload", "p.yaml") == line
    run = f"amptune run p.yaml {tmp_path / 'train.py'} -- --lr 1"
    assert line_for_training(str(tmp_path / "train.py"), "p.yaml", ["--lr", "1"]) == run


def test_the_imports_of_a_target_are_those_that_its_workload_leads_to(tmp_path: Path) -> None:
    """Its file, which may train models of many libraries, is not run."""
    file = tmp_path / "train.py"
    file.write_text(
        "import numpy as np\nfrom pathlib import Path\nraise SystemExit\n"
        "def model():\n    from transformers import BertModel, T5Model\n    return built()\n"
        "def built():\n    import timm.layers\n"
        "def other():\n    import torchvision, datasets.text\n"
        "workload = dict(model=model)\nfrom .mine import loss\n"
    )
    (tmp_path / "datasets").mkdir()  # not the installed library of that name
    found = imports_of(f"{file}:workload")
    assert set(found) == {"numpy", "pathlib:Path", "transformers:BertModel", "transformers:T5Model", "timm.layers"}
    assert set(imports_of(f"{file}:other")) == {*found, "torchvision"}


def test_a_file_that_prepares_its_imports_or_cannot_be_read_tells_none(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    assert imports_of(f"{file}:workload") == []
    for source in ("os.environ['HF_HOME'] = 'here'", "sys.path.insert(0, 'here')", "def (", "\0"):
        file.write_text(f"import os, sys, numpy\n{source}\n")
        assert imports_of(f"{file}:workload") == imports_of(str(file)) == []
