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

TRAINS = {
    "a loop": LOOP,
    "a function that is called": f"def main():\n    {LOOP.replace(chr(10), chr(10) + '    ')}\nmain()\n",
    "a step in a function of its own": "def step(b):\n    loss(b).backward()\nwhile True:\n    step(batch)\n",
    "Accelerate": "for batch in loader:\n    accelerator.backward(model(batch))\n",
    "a closure": "for batch in loader:\n    optimizer.step(closure)\n",
    "a Trainer": "trainer = Trainer(model=model)\ntrainer.train()\n",
    "a Trainer at once": "import lightning as L\nL.Trainer(max_epochs=1).fit(Lit(), loader)\n",
    "within try": f"try:\n    {LOOP.strip().replace(chr(10), chr(10) + '    ')}\nfinally:\n    pass\n",
}

DOES_NOT = {
    "a guard": f"if __name__ == '__main__':\n    {LOOP.strip().replace(chr(10), chr(10) + '    ')}\n",
    "a function that is not called": f"def main():\n    {LOOP.replace(chr(10), chr(10) + '    ')}\n",
    "the training mode": "model = Net()\nmodel.train()\nfor block in model.blocks:\n    block.train()\n",
    "another fit": "scaler = StandardScaler()\nscaler.fit(x)\n",
    "another step": "for _ in range(3):\n    environment.step(0)\n",
    "recursion": "def f(n):\n    return f(n - 1)\nf(3)\n",
    "no Python": "for :::",
}


def said_of(source: str, folder: Path) -> str:
    path = folder / "train.py"
    path.write_text(source)
    with pytest.raises(TargetError) as caught:
        require_importable(path)
    return str(caught.value)


@pytest.mark.parametrize("source", TRAINS.values(), ids=TRAINS)
def test_a_script_that_trains_is_found_out(source: str, tmp_path: Path) -> None:
    assert "train.py trains when it is imported" in said_of(source, tmp_path)


@pytest.mark.parametrize("source", DOES_NOT.values(), ids=DOES_NOT)
def test_one_that_does_not_is_left_alone(source: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source)
    require_importable(tmp_path / "train.py")


def test_a_script_that_tunes_when_it_is_imported_is_shown_the_guard(tmp_path: Path) -> None:
    said = said_of("import amptune\nw = amptune.Workload.of()\nd = amptune.tune(w)\n", tmp_path)
    assert said.startswith("train.py trains when it is imported (train.py:3: d = amptune.tune(w))")
    assert "from_" not in said


def test_functions_that_call_each_other_often_are_read_once(tmp_path: Path) -> None:
    helpers = "".join(f"def f{i}():\n    f{i - 1}(); f{i - 1}()\n" for i in range(1, 60))
    (tmp_path / "train.py").write_text(f"def f0():\n    pass\n{helpers}f59()\n")
    require_importable(tmp_path / "train.py")


def test_the_lines_to_write_are_shown_with_the_scripts_own_names(tmp_path: Path) -> None:
    said = said_of("import lightning as L\nt = L.Trainer()\nt.fit(classifier, train_loader)\n", tmp_path)
    assert said.startswith("train.py trains when it is imported (train.py:3: t.fit(classifier, train_loader))")
    assert 'under a guard:\n\n    if __name__ == "__main__":\n        t.fit(classifier, train_loader)\n' in said
    assert "    workload = amptune.Workload.from_lightning(classifier, train_loader)\n" in said
    assert "Workload.from_trainer(trainer)\n" in said_of(TRAINS["a Trainer"], tmp_path)
    loop = said_of(LOOP, tmp_path)
    assert "        for epoch in range(3):\n            …\n" in loop
    assert "Workload.from_loop(model, loader, loss_fn, optimizer)" in loop
    assert loop.endswith(f"amptune init --from {tmp_path}/train.py")


def test_a_script_that_has_a_workload_is_shown_the_guard_alone(tmp_path: Path) -> None:
    assert "from_loop" not in said_of(f"from amptune import Workload\nw = Workload.of()\n{LOOP}", tmp_path)


def test_a_script_without_a_workload_is_told_so_before_it_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def main():\n    trainer = L.Trainer()\n    trainer.fit(Lit(), datamodule=loader)\n")
    with pytest.raises(TargetError, match=r"train.py has no workload") as caught:
        source_of(str(path))
    assert "return amptune.Workload.from_lightning(Lit(), loader)" in str(caught.value)
    assert f"amptune init --from {path}\n" in str(caught.value)
    assert source_of(f"{path}:main").target == f"{path}:main"


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


def test_it_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{LOOP}")
    with pytest.raises(TargetError, match="trains when it is imported"):
        source_of(f"{path}:workload")
    assert not (tmp_path / "ran").exists()


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


@pytest.mark.parametrize(
    "source",
    [
        "import os, numpy\nos.environ['HF_HOME'] = 'here'\n",
        "import sys, numpy\nsys.path.insert(0, 'here')\n",
        "import numpy\ndef (",
        "\0",
        None,
    ],
)
def test_a_file_that_prepares_its_imports_or_cannot_be_read_tells_none(tmp_path: Path, source: str | None) -> None:
    file = tmp_path / "train.py"
    if source is not None:
        file.write_text(source)
    assert imports_of(f"{file}:workload") == []
    assert imports_of(str(file)) == []
