"""The house rules that a program can check."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "amptune"
ROOMS = ["errors", "hardware", "policy", "runtime", "workload", "measure", "search", "report", "cli"]
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imports_of(source: str, *, package: str = "") -> Iterator[tuple[str, bool]]:
    """(module, whether importing the source imports it too) for every import statement."""
    tree = ast.parse(source)
    at_run_time = set(map(id, _executed(tree)))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{package}{node.module}"]
        for name in names:
            yield name, id(node) in at_run_time


def _executed(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not in functions, not under TYPE_CHECKING."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not type_checking and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "amptune" and len(parts) > 1 and parts[1] in ROOMS else None


def room_of_file(path: Path) -> str | None:
    return room_of(".".join(["amptune", *path.relative_to(PACKAGE).with_suffix("").parts]))


def downward(here: str | None, source: str) -> list[str]:
    """Imports of a room below `here`; a type named in `TYPE_CHECKING` alone is no import."""
    rooms = [
        (name, room_of(name)) for name, executed in imports_of(source) if executed or not _only_for_types(source, name)
    ]
    return [name for name, room in rooms if here and room and ROOMS.index(room) > ROOMS.index(here)]


def _only_for_types(source: str, module: str) -> bool:
    tree = ast.parse(source)
    guarded = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    return any(module == name for block in guarded for name, _ in imports_of("\n".join(map(ast.unparse, block.body))))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_only_to_rooms_above(path: Path) -> None:
    assert downward(room_of_file(path), path.read_text()) == []


def test_the_check_of_imports_can_fail() -> None:
    assert downward("policy", "from amptune.search.sampler.study import Study") == ["amptune.search.sampler.study"]
    assert downward("policy", "def f():\n    import amptune.cli.entry") == ["amptune.cli.entry"]


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("optuna", {"search/sampler/storage.py"}),
        ("yaml", {"policy/yaml_text.py"}),
        ("pynvml", {"hardware/nvml.py"}),
        ("pebble", {"measure/workers/processes.py"}),
        (
            "click",
            {
                f"cli/{name}.py"
                for name in [
                    "entry",
                    "options",
                    "tune",
                    "verify",
                    "diagnose",
                    "init",
                    "probe",
                    "profile",
                    "files",
                    "report",
                    "session",
                ]
            },
        ),
        ("lightning", {"runtime/integrations/lightning.py"}),
        ("pytorch_lightning", {"runtime/integrations/lightning.py"}),
        ("transformers", {"runtime/integrations/transformers.py"}),
        ("accelerate", {"runtime/integrations/accelerate.py"}),
        ("rich", {"report/progress.py", "report/terminal.py"}),
    ],
)
def test_a_library_is_imported_where_it_belongs_alone(library: str, allowed: set[str]) -> None:
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        for name, _ in imports_of(path.read_text())
        if name.split(".")[0] == library
    }
    assert importers == allowed


def test_nothing_imports_what_is_for_a_framework() -> None:
    importers = [
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        for name, _ in imports_of(path.read_text())
        if name.startswith("amptune.runtime.integrations") and path.parent.name != "integrations"
    ]
    assert importers == []


def test_no_public_function_shares_its_modules_name() -> None:
    shared = [
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == path.stem
    ]
    assert shared == []


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter holds after running `code`."""
    program = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def loaded_by(code: str) -> set[str]:
    """The top-level ones of them."""
    return {module.split(".")[0] for module in modules_after(code)}


HEAVY = {"optuna", "click", "rich", "pebble", "sqlalchemy", "lightning", "transformers", "accelerate"}


def test_importing_amptune_is_light() -> None:
    assert not loaded_by("import amptune") & (HEAVY | {"torch", "pydantic", "yaml", "numpy", "pynvml"})


def test_training_loads_neither_the_search_nor_the_terminal(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema: amptune.policy/1\nautocast: bf16\nvalid_for: {torch: '0.1'}\n")
    code = (
        "import warnings, torch, amptune; warnings.simplefilter('ignore')\n"
        f"amptune.apply({str(policy)!r}, torch.nn.Linear(2, 2)).undo()"
    )
    assert not loaded_by(code) & HEAVY


def test_the_check_of_lightness_can_fail() -> None:
    assert "optuna" in loaded_by("import amptune; amptune.tune")


HELP = "import runpy, sys; sys.argv[1:] = ['--help']\ntry: runpy.run_module('amptune', run_name='__main__')\n"


def test_help_answers_without_what_is_slow_to_import() -> None:
    """Starting takes as long as importing: 0.2 s for these modules."""
    modules = modules_after(f"{HELP}except SystemExit: pass")
    assert "amptune.cli.entry" in modules
    heavy = {"torch", "optuna", "pydantic", "rich", "numpy", "scipy", "pebble", "yaml"}
    assert not {module.split(".")[0] for module in modules} & heavy
    assert len(modules - modules_after("")) < 160  # 80 in Python 3.11


def test_every_public_name_is_there() -> None:
    import amptune

    assert all(getattr(amptune, name) is not None for name in amptune.__all__)
    assert set(amptune.__all__) <= set(dir(amptune))
