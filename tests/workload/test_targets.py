from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amptune.errors import TargetError, UserCodeError
from amptune.workload.code_digest import source_digest
from amptune.workload.targets import load_workload, parse_target
from amptune.workload.workload import Workload

WORKLOAD = """
from torch import nn, optim, randn
from amptune import Workload

def build():
    return Workload(model=lambda: nn.Linear(2, 1), batch=lambda n: randn(n, 2),
                    loss=lambda model, batch: model(batch).mean(), optimizer=lambda m: optim.SGD(m.parameters()))

ready = build()
number = 3
def boom():
    raise RuntimeError("no luck")
"""


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("torch", "amptune.", "numpy", "sympy")):
            del sys.modules[name]


@pytest.mark.parametrize("text", ["train", ":name", "train.py:", "train.py:not a name", ""])
def test_a_target_of_the_wrong_form_says_the_right_one(text: str) -> None:
    with pytest.raises(TargetError, match=r"is no target: write FILE.py, FILE.py:NAME or PACKAGE.MODULE:NAME"):
        parse_target(text)


ALONE = WORKLOAD.replace("ready = build()\n", "")


@pytest.mark.parametrize(
    ("source", "asked", "name"),
    [
        (WORKLOAD, ":ready", "ready"),
        (WORKLOAD, ":build", "build"),
        (f"{ALONE}workload = build()\nthe_same = workload\n", "", "workload"),
        (ALONE.replace("def build():", "def build() -> 'Workload':"), "", "build"),
        (f"{ALONE}def workload():\n    return build()\n", "", "workload"),
        ("from beside_it import ready\n", ":ready", "ready"),
    ],
)
def test_a_target_is_a_workload_or_a_function_and_a_file_stands_for_its_one(
    tmp_path: Path, source: str, asked: str, name: str
) -> None:
    (tmp_path / "beside_it.py").write_text(WORKLOAD)
    (tmp_path / "one.py").write_text(source)
    workload = load_workload(parse_target(f"{tmp_path / 'one.py'}{asked}"))
    assert isinstance(workload, Workload)
    assert workload.name == name


@pytest.mark.parametrize(
    ("source", "name", "error", "said"),
    [
        (WORKLOAD, ":redy", TargetError, "has no redy; did you mean ready"),
        (WORKLOAD, ":workload", TargetError, "has no workload; it has the workloads ready"),
        (WORKLOAD, ":number", TargetError, r"is of type int, not an amptune.Workload"),
        (f"{WORKLOAD}\nother = build()\n", "", TargetError, "the workloads ready, other: say which, as in .*:ready"),
        ("x = 1\n", "", TargetError, "has no workload: write one line, workload = amptune.Workload.from_loop"),
        (WORKLOAD, ":boom", UserCodeError, r"RuntimeError: no luck \(.*script.py:12\)"),
        ("next(iter(()))\n", ":x", UserCodeError, r"importing script.py raised StopIteration \(.*script.py:1\)"),
        (
            "\nraise KeyboardInterrupt",
            ":x",
            UserCodeError,
            r"raised KeyboardInterrupt.*script.py:2",
        ),
        (
            "import surely_not_installed\n",
            ":x",
            UserCodeError,
            f"install it for {sys.executable}, or run amptune in the folder that holds it, not in {Path.cwd()}",
        ),
    ],
)
def test_a_target_that_leads_to_no_workload_is_the_users_error_with_its_place(
    tmp_path: Path, source: str, name: str, error: type[Exception], said: str
) -> None:
    (tmp_path / "script.py").write_text(source)
    with pytest.raises(error, match=said):
        load_workload(parse_target(f"{tmp_path / 'script.py'}{name}"))


ARGUMENTS = """
import argparse
def parse():
    parser = argparse.ArgumentParser("train.py")
    parser.add_argument("--data", required=True)
    return parser.parse_args([])
"""


@pytest.mark.parametrize("use", ["parse()", "def workload():\n    return parse()"])
def test_what_argparse_says_is_shown(tmp_path: Path, use: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{ARGUMENTS}\n{use}\n")
    with pytest.raises(UserCodeError) as caught:
        load_workload(parse_target(f"{path}:workload"))
    said = str(caught.value)
    assert "raised SystemExit: 2" in said
    assert "train.py: error: the following arguments are required: --data" in said
    assert said.endswith("the script's arguments stand behind --: amptune tune FILE.py -- ARGUMENTS")
    assert "--data" in capsys.readouterr().err  # and in the log


def test_a_module_that_does_not_exist_is_a_wrong_target_and_a_failing_import_in_it_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfway.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TargetError, match="there is no module nosuchpackage"):
        load_workload(parse_target("nosuchpackage.train:workload"))
    with pytest.raises(UserCodeError, match="ModuleNotFoundError"):
        load_workload(parse_target("halfway:workload"))


def test_a_script_of_a_package_can_import_from_the_working_directory_as_python_m_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_package").mkdir()
    (tmp_path / "of_a_package" / "parts.py").write_text(WORKLOAD)
    (tmp_path / "of_a_package" / "script.py").write_text("from of_a_package.parts import ready\n")
    monkeypatch.chdir(tmp_path)
    assert load_workload(parse_target("of_a_package/script.py:ready")).name == "ready"


def test_the_digest_of_a_source_changes_with_it_and_what_it_imports_from_beside_it(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text("import model\n")
    (tmp_path / "model.py").write_text("import layers, os\n")
    (tmp_path / "script.py").write_text("from model import Net\nimport torch\n")
    target = parse_target(f"{tmp_path / 'script.py'}:ready")
    before = source_digest(target)
    (tmp_path / "other.py").write_text("")
    assert source_digest(target) == before
    (tmp_path / "layers.py").write_text("import model\nwidth = 3\n")
    changed = source_digest(target)
    (tmp_path / "script.py").write_text("from model import Net\nimport torch\n# changed\n")
    assert len({before, changed, source_digest(target)}) == 3


def test_a_workload_tells_all_its_mistakes_at_once() -> None:
    with pytest.raises(TargetError) as caught:
        Workload(model=3, batch=None, optimizer=len, batch_size=0)  # type: ignore[arg-type]  # the mistake under test
    for words in ("model must be a function, not int", "batch is missing", "either loss or step", "at least 1, not 0"):
        assert words in str(caught.value)
    parts: dict[str, Any] = dict.fromkeys(("model", "batch", "optimizer", "loss"), len)
    assert Workload(**parts).loader is None
    for part in ("loader", "parallel"):
        with pytest.raises(TargetError, match=f"{part} must be a function, not list"):
            Workload(**{**parts, part: []})
