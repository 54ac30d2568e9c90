"""Are the tests green on any machine, and do they notice what is broken?

    python reports/suite.py runs --runs 3 --out reports/suite
    python reports/suite.py runs --busy 6 --out reports/suite
    python reports/suite.py places --count 160 --seed 7 --out reports/suite
    python reports/suite.py breaks --tree . --cover-first --out reports/suite/after.jsonl

`runs` runs `make test` in this checkout, beside loops that keep cores busy if asked, and adds a row to OUT/runs.json:
seconds, CPU seconds, and what failed. `places` draws places to break (OUT/places.json) before anything is thinned.
`breaks` breaks one after another in a copy of TREE and runs those tests of the room that execute the broken lines; it
goes on where it stopped. One run of all tests under coverage (`pip install pytest-cov`) says which tests
execute which lines; `--cover-first` makes it. A test that executes no broken line cannot notice it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import places

REPOSITORY = Path(__file__).resolve().parent.parent
LOOP = "while True: pass"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
LIMIT_S = 300
"""CPU seconds for the tests of one place; wall-clock time is four times that."""
TESTS = {"changes": ["runtime", "policy"], "measure": ["measure", "numerics"]}
"""Folders of tests for a room whose tests do not stand in a folder of its name alone."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    runs = ways.add_parser("runs")
    runs.add_argument("--runs", type=int, default=1)
    runs.add_argument("--busy", type=int, default=0, help="loops that keep a core busy meanwhile")
    runs.add_argument("--target", default="test", help="of make")
    runs.add_argument("--where", default="", help="what is special about the machine, for the row")
    draw = ways.add_parser("places")
    draw.add_argument("--count", type=int, default=120)
    draw.add_argument("--seed", type=int, default=0)
    breaks = ways.add_parser("breaks")
    breaks.add_argument("--tree", type=Path, default=REPOSITORY)
    breaks.add_argument("--places", type=Path, default=REPOSITORY / "reports/suite/places.json")
    breaks.add_argument("--coverage", type=Path, default=Path(tempfile.gettempdir()) / "amptune-suite.coverage")
    breaks.add_argument("--cover-first", action="store_true", help="run all tests under coverage first")
    for one in (runs, draw, breaks):
        one.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.way == "runs":
        return all_runs(arguments)
    if arguments.way == "places":
        drawn = places.draw(REPOSITORY, ".", arguments.count, arguments.seed)
        (arguments.out / "places.json").write_text(json.dumps([one.row() for one in drawn], indent=1) + "\n")
        return 0
    if arguments.cover_first:
        cover(arguments.tree, ["tests"], arguments.coverage)
    asked = [places.Place(**row) for row in json.loads(arguments.places.read_text())]
    break_all(asked, arguments.tree, arguments.coverage, arguments.out)
    return 0


def all_runs(arguments: argparse.Namespace) -> int:
    """Each run is a row of OUT/runs.json as it ends."""
    path = arguments.out / "runs.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    failures = 0
    for _ in range(arguments.runs):
        rows.append({"where": arguments.where, **run(arguments.target, arguments.busy)})
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)
        failures += bool(rows[-1]["exit_code"])
    return int(failures > 0)


def run(target: str, busy: int) -> dict[str, Any]:
    """One `make` of the target: how long it took, and what failed."""
    with tempfile.TemporaryDirectory() as folder, loops(busy):
        report = Path(folder) / "report.xml"
        environment = {**os.environ, "PYTEST_ADDOPTS": f"--junitxml={report}"}
        started, cpu = time.monotonic(), cpu_of_children()
        done = subprocess.run(["make", target], cwd=REPOSITORY, env=environment, capture_output=True, check=False)  # noqa: S607
        seconds, cpu = time.monotonic() - started, cpu_of_children() - cpu
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    return {
        "target": target,
        "busy": busy,
        "cores": len(os.sched_getaffinity(0)),
        "exit_code": done.returncode,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "tests": len(cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in cases if _failed(case)],
        "output": done.stdout.decode(errors="replace")[-2000:] if done.returncode else "",
    }


def cpu_of_children() -> float:
    """CPU seconds of all ended child processes and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


@contextmanager
def loops(count: int) -> Iterator[None]:
    """So many cores are kept busy by something else meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def cover(tree: Path, tests: Sequence[str], data: Path) -> None:
    """Runs tests of a tree under coverage, and keeps which test executed which line."""
    environment = {**_environment(tree), "COVERAGE_FILE": str(data)}
    line = [
        *PYTEST,
        "-n",
        "2",
        "-m",
        "not slow and not gpu",
        "--cov=amptune",
        "--cov-context=test",
        "--cov-report=",
        *tests,
    ]
    subprocess.run([*line, f"--junitxml={data}.xml"], cwd=tree, env=environment, check=False)


def seconds_of_tests(data: Path) -> dict[str, float]:
    """Seconds of each test, by file and name, as `cover` kept them."""
    cases = ElementTree.parse(f"{data}.xml").getroot().iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": float(case.get("time", 0)) for case in cases}


def covering(data: Path) -> dict[str, dict[int, list[str]]]:
    """The tests that executed each line of each file (as `amptune/…`), by what `cover` kept."""
    from coverage import CoverageData

    kept = CoverageData(basename=str(data))
    kept.read()
    found: dict[str, dict[int, list[str]]] = {}
    for file in kept.measured_files():
        name = file[file.rindex("/amptune/") + 1 :]
        by_line = kept.contexts_by_lineno(file)
        found[name] = {line: [c.rpartition("|")[0] for c in contexts if c] for line, contexts in by_line.items()}
    return found


def break_all(asked: Sequence[places.Place], tree: Path, data: Path, out: Path) -> None:
    """A JSON line for each place: noticed, missed, no test, or gone; a place that has its line is not broken again."""
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    tests, seconds = covering(data), seconds_of_tests(data)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for at, place in enumerate(asked[len(done) :], len(done)):
            started = time.monotonic()
            became = became_of(place, copy, tests, seconds)
            row = {"at": at, "became": became, "seconds": round(time.monotonic() - started), **place.row()}
            done.append(row)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{at:4} {became:8} {place.file} {place.function}: {place.old!r} -> {place.new!r}"[:180], flush=True)
    print(dict(Counter(row["became"] for row in done)))


def became_of(
    place: places.Place, copy: Path, tests: dict[str, dict[int, list[str]]], seconds: dict[str, float]
) -> str:
    """Breaks one place, runs the tests of its room that execute it, and mends it."""
    path = copy / place.file
    text = path.read_text() if path.exists() else ""
    changed = places.broken(place, text)
    if changed is None:
        return "gone"
    folders = _folders(place.file)
    chosen = {test for line in changed[1] for test in tests.get(place.file, {}).get(line, [])}
    ours = sorted(
        (test for test in chosen if test.startswith(folders)), key=lambda test: seconds.get(_as_case(test), 0)
    )
    if not ours:
        return "no test"
    path.write_text(changed[0])
    try:
        return "missed" if _pass(ours, copy) else "noticed"
    finally:
        path.write_text(text)


def _as_case(test: str) -> str:
    file, _, name = test.partition("::")
    return f"{file.removesuffix('.py').replace('/', '.')}::{name}"


def _folders(file: str) -> tuple[str, ...]:
    room = file.split("/")[1] if file.count("/") > 1 else ""
    return tuple(f"tests/{name}/" for name in TESTS.get(room, [room])) if room else ("tests/",)


def _pass(tests: Sequence[str], copy: Path) -> bool:
    """Whether all pass in the time; what hangs is noticed too."""
    names = copy.parent / "tests.txt"
    names.write_text("\n".join(tests) + "\n")
    line = ["bash", "-c", f'ulimit -t {LIMIT_S}; exec "$@"', "bash", *PYTEST, "-x", f"@{names}"]
    try:
        done = subprocess.run(
            line, cwd=copy, env=_environment(copy), capture_output=True, check=False, timeout=4 * LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree.resolve()), "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    sys.exit(main())
