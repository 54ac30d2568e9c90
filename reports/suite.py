"""Runs the tests many times, quiet and beside other work: are they green, and what takes how long?

    python reports/suite.py --runs 10 --busy 5 --out reports/suite
    python reports/suite.py --breaks reports/suite/breaks.json --out reports/suite

The first runs `make test` in turn in this checkout, `--busy` of the runs with one core kept busy by a loop, and writes
OUT/runs.json: wall-clock seconds, what failed, and seconds by file. The second breaks the package in one place after
another, in a copy, and runs the test that is to notice; it writes OUT/breaks.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
LOOP = "while True: pass"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="of the runs, with one core kept busy; the last ones")
    parser.add_argument("--target", default="test", help="of make")
    parser.add_argument("--clean", action="store_true", help="make clean before each run, so that it installs too")
    parser.add_argument("--breaks", type=Path, help="places to break, with the test that is to fail")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.breaks is not None:
        return broken(json.loads(arguments.breaks.read_text()), arguments.out / "breaks.txt")
    path = arguments.out / "runs.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for number in range(arguments.runs):
        is_busy = number >= arguments.runs - arguments.busy
        if arguments.clean:
            subprocess.run(["make", "clean"], cwd=REPOSITORY, check=True)  # noqa: S607
        rows.append({"installs": arguments.clean, **run(arguments.target, is_busy=is_busy)})
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(told(rows[-1]), flush=True)
    return int(any(row["exit_code"] for row in rows))


def run(target: str, *, is_busy: bool) -> dict[str, Any]:
    """One `make` of the target: how long, what failed, and the seconds of each file's tests."""
    with tempfile.TemporaryDirectory() as folder, _busy(is_busy):
        report = Path(folder) / "report.xml"
        environment = {**os.environ, "PYTEST_ADDOPTS": f"--junitxml={report}"}
        started = time.monotonic()
        line = ["make", target]
        done = subprocess.run(line, cwd=REPOSITORY, env=environment, capture_output=True, check=False)
        seconds = time.monotonic() - started
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    by_file: dict[str, float] = defaultdict(float)
    for case in cases:
        by_file[str(case.get("classname"))] += float(case.get("time", 0))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if _failed(case)]
    return {
        "target": target,
        "busy": is_busy,
        "cores": len(os.sched_getaffinity(0)),
        "exit_code": done.returncode,
        "seconds": round(seconds, 1),
        "tests": len(cases),
        "failed": failed,
        "seconds_by_file": {name: round(spent, 1) for name, spent in sorted(by_file.items(), key=lambda one: -one[1])},
        "output": done.stdout.decode(errors="replace")[-2000:] if done.returncode else "",
    }


def told(row: dict[str, Any]) -> str:
    """One run in a line."""
    beside = "beside other work" if row["busy"] else "quiet"
    failed = f", failed: {', '.join(row['failed'])}" if row["failed"] else ""
    return (
        f"make {row['target']}, {beside}: {row['seconds']:.0f} s, {row['tests']} tests, exit {row['exit_code']}{failed}"
    )


def broken(breaks: Sequence[dict[str, str]], out: Path) -> int:
    """Each place broken by itself, and whether the test that holds it fails; 1 if one does not."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        for one in breaks:
            lines.append(f"{_noticed(one, copy):9} {one['test']}\n{'':9} {one['file']}: {_in_a_line(one)}")
            print(lines[-1], flush=True)
            out.write_text("\n".join(lines) + "\n")
    return int(any(not line.startswith("noticed") for line in lines))


def _noticed(one: dict[str, str], copy: Path) -> str:
    """Returns "noticed" if the test passes as the file is, and fails with the place broken."""
    path = copy / one["file"]
    text = path.read_text()
    if text.count(one["old"]) != 1:
        return "no place"
    if not _passes(one["test"], copy):
        return "fails"
    path.write_text(text.replace(one["old"], one["new"]))
    try:
        return "passes" if _passes(one["test"], copy) else "noticed"
    finally:
        path.write_text(text)


def _passes(test: str, copy: Path) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(line, cwd=copy, env=environment, capture_output=True, check=False).returncode == 0


def _in_a_line(one: dict[str, str]) -> str:
    return f"{' '.join(one['old'].split())}  ->  {' '.join(one['new'].split()) or 'nothing'}"


def _failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


@contextmanager
def _busy(is_busy: bool) -> Iterator[None]:
    """One core kept busy by something else meanwhile."""
    if not is_busy:
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", LOOP])
    try:
        yield
    finally:
        other.kill()
        other.wait()


if __name__ == "__main__":
    sys.exit(main())
