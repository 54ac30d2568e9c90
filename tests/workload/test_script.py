"""Scripts are read before they are imported: one that would train is shown the lines to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from amptune.errors import TargetError
from amptune.search.request import source_of
from amptune.workload.script import imports_of, line_for_training, require_importable

LOOP = """
for epoch in range(3):
    for x, y in loader:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
"""

INDENTED = LOOP.strip().replace("\n", "\n    ")
TRAINER = "trainer = Trainer(model=model)\ntrainer.train()\n"
TRAINS = [
    LOOP,
    f"def main():\n    {INDENTED}\nmain()\n",
    "def step(b):\n    loss(b).backward()\nwhile True:\n    step(batch)\n",
    "for batch in loader:\n    optimizer.step(closure)\n",
    TRAINER,
    f"try:\n    {INDENTED}\nfinally:\n    pass\n",
]
DOES_NOT = [
    f"if __name__ == '__main__':\n    {INDENTED}\n",
    f"def main():\n    {INDENTED}\n",
    "model = Net()\nmodel.train()\nfor block in model.blocks:\n    block.train()\n",
    "scaler = StandardScaler()\nscaler.fit(x)\n",
    "for _ in range(3):\n    environment.step(0)\n",
    "def f(n):\n    return f(n - 1)\nf(3)\n",
    "def f0():\n    pass\n" + "".join(f"def f{i}():\n    f{i - 1}(); f{i - 1}()\n" for i in range(1, 60)) + "f59()\n",
    "for :::",
]


def said_of(source: str, folder: Path) -> str:
    path = folder / "train.py"
    path.write_text(source)
    with pytest.raises(TargetError) as caught:
        require_importable(path)
    return str(caught.value)


@pytest.mark.parametrize("source", TRAINS)
def test_a_script_that_trains_is_found_out(source: str, tmp_path: Path) -> None:
    assert "train.py trains when it is imported" in said_of(source, tmp_path)


@pytest.mark.parametrize("source", DOES_NOT)
def test_one_that_does_not_is_left_alone(source: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source)
    require_importable(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("source", "shown", "workload"),
    [
        (
            "import lightning as L\nt = L.Trainer()\nt.fit(classifier, train_loader)\n",
            "        t.fit(classifier, train_loader)\n",
            "from_lightning(classifier, train_loader)",
        ),
        (TRAINER, "        trainer.train()\n", "from_trainer(trainer)"),
        (LOOP, "        for epoch in range(3):\n            …\n", "from_loop(model, loader, loss_fn, optimizer)"),
        ("w = amptune.Workload.of()\namptune.tune(w)\n", "        amptune.tune(w)", None),
        (f"w = Workload.of()\n{LOOP}", "        for epoch in range(3):\n            …", None),
    ],
)
def test_the_lines_to_write_have_the_scripts_own_names(
    source: str, shown: str, workload: str | None, tmp_path: Path
) -> None:
    said = said_of(source, tmp_path)
    assert f'if __name__ == "__main__":\n{shown}' in said
    assert (f"    workload = amptune.Workload.{workload}\n" in said) if workload else ("from_" not in said)


def test_a_script_without_a_workload_and_one_that_trains_are_told_before_they_are_run(tmp_path: Path) -> None:
    path, ran = tmp_path / "train.py", tmp_path / "ran"
    runs = f"open({str(ran)!r}, 'w')\n"
    path.write_text(f"{runs}def main():\n    trainer = L.Trainer()\n    trainer.fit(Lit(), datamodule=loader)\n")
    with pytest.raises(TargetError, match=r"train.py has no workload") as caught:
        source_of(str(path))
    assert "return amptune.Workload.from_lightning(Lit(), loader)" in str(caught.value)
    assert source_of(f"{path}:main").target == f"{path}:main"
    path.write_text(f"{runs}{LOOP}")
    with pytest.raises(TargetError, match="trains when it is imported"):
        source_of(f"{path}:workload")
    assert not ran.exists()


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
