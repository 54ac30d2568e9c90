"""The house rules that a program can check."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "amptune"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Rooms, and modules that stand between rooms, from the top down: a module imports from its own place and those above.
# A module has the last place here that names it or one of the rooms it is in.
PLACES = [
    "errors", "hardware", "changes", "policy",
    "runtime", "runtime.graphs", "runtime.guard", "runtime.half", "runtime.tuned", "runtime.apply_policy",
    "runtime.script", "runtime.integrations",
    "workload", "workload.zoo",
    "measure.results", "measure.bench", "measure.numerics", "measure.modules", "measure.breakdown",
    "measure.loop", "measure.workers", "measure", "measure.evaluator",
    "search.table", "search.plan", "search.space", "search.batch_size", "search.gate", "search.job", "search.events",
    "search.sampler", "search.decide", "search", "search.request", "search.state", "search.measuring",
    "search.durations", "search.refinements", "search.next_job", "search.timeline", "search.perform", "search.decided",
    "search.run_start", "search.run", "search.pipeline", "search.api", "search.verification",
    "search.numerics_verification", "search.diagnosis",
    "report", "__init__", "cli", "__main__",
]  # fmt: skip


def imports_of(source: str) -> Iterator[str]:
    """Each name that an import statement imports, those in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    """The module's dotted name within the package; a room's `__init__` has the room's, the package's has its own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in SOURCES}


def modules_in(source: str) -> set[str]:
    """The modules of the package that a source imports, or imports something from."""
    named = {name.removeprefix("amptune.") for name in imports_of(source) if name.startswith("amptune.")}
    outer = {name if name in MODULES else name.rpartition(".")[0] or "__init__" for name in named}
    return outer & MODULES.keys()


def place_of(module: str) -> int:
    parts = module.split(".")
    named = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return PLACES.index(next(name for name in named if name in PLACES))


def downward(here: str, source: str) -> list[str]:
    """The modules that a source in `here` imports from below."""
    return sorted(module for module in modules_in(source) if place_of(module) > place_of(here))


def test_imports_point_only_to_places_above() -> None:
    found = {module: downward(module, path.read_text()) for module, path in MODULES.items()}
    assert {module: below for module, below in found.items() if below} == {}


def test_the_check_of_imports_can_fail() -> None:
    assert downward("policy.settings", "def f():\n    import amptune.cli.entry") == ["cli.entry"]
    assert downward("search.table.trial", "from amptune.search import events") == ["search.events"]
    guarded = "if TYPE_CHECKING:\n    from amptune.runtime.tuned import Tuned"
    assert downward("runtime.graphs.capture", guarded) == ["runtime.tuned"]


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Under TYPE_CHECKING and inside functions neither. A package is no module here: it only holds others."""
    imports = {name: modules_in(path.read_text()) - {"__init__"} for name, path in MODULES.items()}
    TopologicalSorter(imports).prepare()


def test_no_two_modules_and_no_two_public_classes_have_one_name() -> None:
    files = Counter(path.stem for path in SOURCES if "cli" not in path.parts and not path.stem.startswith("__"))
    classes = Counter(
        node.name
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, times in (files + classes).items() if times > 1] == []


def test_every_room_says_what_it_holds() -> None:
    silent = [room for room in PACKAGE.rglob("__init__.py") if not ast.get_docstring(ast.parse(room.read_text()))]
    assert silent == []


# Each library is imported in these modules, or these rooms, alone.
HOMES = {
    "optuna": ["search.sampler"],
    "yaml": ["policy.yaml_text"],
    "pynvml": ["hardware.nvml"],
    "pebble": ["measure.workers.processes"],
    "click": ["cli"],
    "lightning": ["runtime.integrations.lightning"],
    "pytorch_lightning": ["runtime.integrations.lightning"],
    "transformers": ["runtime.integrations.transformers"],
    "accelerate": ["runtime.integrations.accelerate"],
    "rich": ["report.progress", "report.live_display", "report.terminal"],
    "amptune.runtime.integrations": ["runtime.integrations"],
}


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_where_it_belongs_alone(library: str) -> None:
    strangers = [
        module
        for module, path in MODULES.items()
        if any(f"{name}.".startswith(f"{library}.") for name in imports_of(path.read_text()))
        and not any(f"{module}.".startswith(f"{home}.") for home in HOMES[library])
    ]
    assert strangers == []


LONGEST = 400  # lines of a module; none is cut in two for a counter


def test_no_module_is_longer_than_a_reader_bears() -> None:
    lines = {name: path.read_text().count("\n") for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def test_a_run_knows_few_modules() -> None:
    """Who follows a request reads it first."""
    assert len(modules_in(MODULES["search.run"].read_text())) <= 12


def test_a_request_is_followed_through_twelve_files_at_most() -> None:
    told = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"^(\d+)\. `([a-z_/]+)`", told, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert 10 < len(steps) <= 12
    assert [path for _, path in steps if not (PACKAGE / f"{path}.py").is_file()] == []


def two_meanings(sources: Iterable[str]) -> list[str]:
    """The names that are constants of several values."""
    values: dict[str, set[str]] = {}
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name, value in _pairs(targets[0], node.value):
                    if name.isupper():
                        values.setdefault(name.lstrip("_"), set()).add(value)
    return sorted(name for name, different in values.items() if len(different) > 1)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, own in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, own)
    else:
        yield ast.unparse(target), ast.unparse(value)


def test_a_constants_name_means_one_thing_in_searching_and_measuring() -> None:
    rooms = [path for room in ("search", "measure") for path in (PACKAGE / room).rglob("*.py")]
    assert two_meanings(path.read_text() for path in rooms) == []
    assert two_meanings(["HALF, REST = 0.5, 2", "_HALF: str = 'fp16'"]) == ["HALF"], "the check can fail"


MOST_NUMBERS = {"search": 153, "measure": 125}
CONVERSIONS = 100, 1000, 1024


def numbers_in(source: str) -> list[float]:
    """Numbers that somebody chose: not 0, 1, 2, -1, a percent or a conversion of units."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    numbers = (value for value in constants if isinstance(value, int | float) and not isinstance(value, bool))
    return [value for value in numbers if value not in (0, 1, 2, *CONVERSIONS)]


@pytest.mark.parametrize("room", MOST_NUMBERS)
def test_few_numbers_in_searching_and_measuring_are_chosen(room: str) -> None:
    counts = {path: len(numbers_in(path.read_text())) for path in (PACKAGE / room).rglob("*.py")}
    assert sum(counts.values()) <= MOST_NUMBERS[room], Counter(counts).most_common(5)
    assert numbers_in("a, b = -1, 0.5; ms = 1000 * s; n = 7 if True else 2") == [0.5, 7], "the count can fail"


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running `code`."""
    program = f"{code}\nimport sys, json; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"optuna", "click", "rich", "pebble", "sqlalchemy", "lightning", "transformers", "accelerate"}


TRAINED = "import torch, amptune; amptune.apply(amptune.load('apex:O1').policy, torch.nn.Linear(2, 2))"


@pytest.mark.parametrize(
    ("code", "without"),
    [
        ("import amptune", HEAVY | {"torch", "pydantic", "yaml", "numpy", "pynvml"}),
        (TRAINED, HEAVY),
        ("import amptune; amptune.tune", {"optuna", "sqlalchemy", "torch", "numpy"}),  # workers start before the search
        # Optuna takes 5 to 10 s to import on a slow host: while the workload is built
        ("import amptune.search.pipeline", {"optuna"}),
        ("import amptune.search.run", {"sqlalchemy"}),  # takes a second, and is for databases
    ],
)
def test_what_is_imported_is_light(code: str, without: set[str]) -> None:
    assert not loaded_by(code) & without


def test_neither_a_tuning_nor_a_report_imports_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers do. The tuning is a whole one, on a simulated machine; it and the report go through the commands."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), *sys.path]))
    code = (
        "from pathlib import Path; from commands import run; from frozen.commands import written_study\n"
        f"study = {str(tmp_path / 'study')!r}; page = {str(tmp_path / 'page.html')!r}; written_study(Path(study))\n"
        "assert run('report', study, '-o', page, folder=Path()).returncode == 0"
    )
    loaded = loaded_by(code)
    assert ("optuna" in loaded, "torch" in loaded) == (True, False)


HELP = "import runpy, sys; sys.argv[1:] = ['--help']\ntry: runpy.run_module('amptune', run_name='__main__')\n"


def test_help_answers_without_what_is_slow_to_import() -> None:
    loaded = loaded_by(f"{HELP}except SystemExit: pass")
    assert "click" in loaded
    assert not loaded & {"torch", "optuna", "pydantic", "rich", "numpy", "scipy", "pebble", "yaml"}


def test_every_public_name_is_there() -> None:
    import amptune

    assert all(getattr(amptune, name) is not None for name in amptune.__all__)
    assert set(amptune.__all__) <= set(dir(amptune))
