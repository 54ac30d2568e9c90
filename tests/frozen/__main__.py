"""Holds the tree against what amptune did at the starting commit (tests/frozen/START).

    python -m frozen check                       what differs, as a diff; exit code 1 if anything does
    python -m frozen accept NAME --why "..."     keeps what differs as changes/NAME.diff: a change made on purpose
    python -m frozen replay --out F [--start]    other tunings: --trouble oom=0.3 --budget 120 --tunings 40
    python -m frozen record                      records everything; once, at the starting commit

Run with `tests/` on the path: PYTHONPATH=tests python -m frozen check.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RECORDED, CHANGES, START = HERE / "recorded", HERE / "changes", HERE / "START"
# (first line from 0, the lines that go, the lines that come)
Hunk = tuple[int, list[str], list[str]]
# Where the starting commit is checked out, beside the tree.
BESIDE = REPOSITORY / ".frozen"


def main() -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m frozen", description=__doc__, formatter_class=words)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="hold the tree against what was recorded")
    check.add_argument("pages", nargs="*", metavar="PAGE", help="such as help.txt or decisions; all by default")
    accept = commands.add_parser("accept", help="keep what differs as a change made on purpose")
    accept.add_argument("name", help="of the file in tests/frozen/changes, such as 0024-sampler")
    accept.add_argument("--why", required=True, help="the reason, which stands above the diff")
    replays = commands.add_parser("replay", help="other simulated tunings, on this tree or on the starting commit")
    replays.add_argument("--out", type=Path, required=True)
    replays.add_argument("--start", action="store_true", help="on the starting commit")
    replays.add_argument("--tunings", type=int, default=42)
    replays.add_argument("--budget", type=float, default=150.0, help="simulated seconds")
    replays.add_argument("--objective", default="throughput")
    replays.add_argument("--variant", default="own space", help="of VARIANTS in tests/frozen/decisions.py")
    replays.add_argument(
        "--trouble", nargs="*", default=[], metavar="NAME=VALUE", help="of simulated.landscape.Trouble"
    )
    commands.add_parser("record", help="record everything, once")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if arguments.command == "record":
        return record()
    if arguments.command == "replay":
        return replay(arguments)
    return held(arguments.pages) if arguments.command == "check" else accepted(arguments.name, arguments.why)


def found(wanted: Sequence[str] = ()) -> dict[str, str]:
    """The pages of this tree by name; all, or those whose names begin with one of `wanted`."""
    from frozen import commands, decisions, names, tensors, texts

    makers: Mapping[str, Callable[[], str]] = {
        "help.txt": commands.helps,
        "errors.txt": commands.errors,
        "answers.txt": commands.answers,
        "json.txt": commands.shapes,
        "names.txt": names.names,
        "texts.txt": texts.texts,
        "tensors.txt": tensors.tensors,
    }
    pages = {name: make() for name, make in makers.items() if _is_wanted(name, wanted)}
    if _is_wanted("schemas/", wanted):
        pages |= commands.schemas()
    if _is_wanted("decisions/", wanted):
        pages |= decisions.decisions()
    return {name: _portable(page) for name, page in pages.items()}


def held(wanted: Sequence[str]) -> int:
    """Prints what differs from the recording and from the changes made on purpose."""
    from frozen.decisions import versions

    expected, now = _expected(), found(wanted)
    names = sorted(name for name in {*expected, *now} if _is_wanted(name, wanted))
    different = [name for name in names if expected.get(name) != now.get(name)]
    for name in different:
        sys.stdout.writelines(_diff(name, expected.get(name, ""), now.get(name, "")))
    if not different:
        print(f"{len(names)} pages, {sum(map(len, map(str.splitlines, now.values()))):,} lines: all as recorded")
        return 0
    recorded_with = (RECORDED / "versions.txt").read_text().strip()
    print(f"{len(different)} of {len(names)} pages differ: {', '.join(different)}", file=sys.stderr)
    if recorded_with != versions():
        print(f"recorded with {recorded_with}; here are {versions()}, which decide ties too", file=sys.stderr)
    return 1


def accepted(name: str, why: str) -> int:
    """Writes what differs as a change made on purpose; it is a part of what is expected from now on."""
    expected, now = _expected(), found()
    names = sorted({*expected, *now})
    diff = "".join(line for name in names for line in _diff(name, expected.get(name, ""), now.get(name, "")))
    if not diff:
        print("nothing differs", file=sys.stderr)
        return 1
    CHANGES.mkdir(exist_ok=True)
    path = CHANGES / f"{name}.diff"
    if path.exists():
        print(f"{path} exists already", file=sys.stderr)
        return 2
    path.write_text(f"{why}\n\n{diff}")
    print(f"wrote {path.relative_to(REPOSITORY)}: {diff.count(chr(10) + '@@') + diff.startswith('@@')} places")
    return 0


def record() -> int:
    """Records everything. Refuses where something is recorded already: that is kept, and changes stand beside it."""
    from frozen.commands import written_study
    from frozen.decisions import versions

    if RECORDED.exists():
        print(f"{RECORDED} is recorded; `accept` keeps what has changed on purpose", file=sys.stderr)
        return 2
    study = HERE / "files" / "study"
    if not (study / "journal.log").exists():
        written_study(study)
    for name, text in {**found(), "versions.txt": f"{versions()}\n"}.items():
        path = RECORDED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def replay(arguments: argparse.Namespace) -> int:
    """Decides other cases; with `--start` by the starting commit's amptune, through the adapter that it has."""
    if arguments.start:
        tree = checkout()
        paths = os.pathsep.join([str(tree), str(HERE.parent)])
        environment = {**os.environ, "PYTHONPATH": paths, "FROZEN_ADAPTER": str(tree / "tests/frozen/adapter.py")}
        words = [word for word in sys.argv[1:] if word != "--start"]
        line = [sys.executable, "-m", "frozen", *words, "--out", str(arguments.out.resolve())]
        return subprocess.run(line, cwd=tree, env=environment, check=False).returncode
    from simulated.landscape import WORKLOADS, trouble_of

    from frozen import decisions
    from frozen.decisions import Case

    if arguments.variant not in decisions.VARIANTS:
        sys.exit(f"--variant: {arguments.variant!r} is none of {', '.join(decisions.VARIANTS)}")
    trouble = trouble_of(arguments.trouble)
    cases = [
        Case(
            workload=WORKLOADS[seed % len(WORKLOADS)], seed=seed, budget_s=arguments.budget,
            objective=arguments.objective, variant=arguments.variant, trouble=trouble,
        )
        for seed in range(arguments.tunings)
    ]  # fmt: skip
    import amptune

    print(f"amptune of {Path(amptune.__file__).parents[1]}", file=sys.stderr)
    told = decisions.in_processes(cases)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n".join(f"== {case.title}\n{text}" for case, text in zip(cases, told, strict=True)))
    return 0


def checkout() -> Path:
    """The starting commit's tree, beside this one; made where it is not there yet."""
    commit = START.read_text().split()[0]
    tree = BESIDE / commit[:12]
    if not has_start():
        sys.exit(f"this clone does not have the starting commit {commit}: git fetch --unshallow")
    if not tree.exists():
        BESIDE.mkdir(exist_ok=True)
        (BESIDE / ".gitignore").write_text("*\n")
        line = ["git", "worktree", "add", "--detach", str(tree), commit]
        subprocess.run(line, cwd=REPOSITORY, check=True)
    return tree


def has_start() -> bool:
    """Whether this clone has the starting commit."""
    line = ["git", "cat-file", "-e", START.read_text().split()[0]]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, check=False).returncode == 0


def _expected() -> dict[str, str]:
    """What was recorded, with the changes made on purpose since, in the order of their names."""
    pages = {
        str(path.relative_to(RECORDED)): _portable(path.read_text())
        for path in sorted(RECORDED.rglob("*"))
        if path.is_file()
    }
    del pages["versions.txt"]
    for change in sorted(CHANGES.glob("*.diff")):
        _apply(_portable(change.read_text()), pages)
    return pages


def _portable(page: str) -> str:
    """The page with long numbers rounded: another processor may give other last digits."""
    return re.sub(r"\d+\.\d{10,}", lambda number: f"{float(number[0]):.9g}", page)


def _apply(change: str, pages: dict[str, str]) -> None:
    """Changes the pages as a diff of ours says: its hunks have no context to look for, so they go by line numbers."""
    for name, hunks in _hunks(change):
        lines = pages.get(name, "").splitlines(keepends=True)
        for start, old, new in reversed(hunks):
            if lines[start : start + len(old)] != old:
                raise SystemExit(
                    f"tests/frozen/changes: a change does not fit {name}:{start + 1}; were changes renamed?"
                )
            lines[start : start + len(old)] = new
        pages[name] = "".join(lines)


def _hunks(change: str) -> Iterator[tuple[str, list[Hunk]]]:
    """The hunks of each page of a diff."""
    pages: dict[str, list[Hunk]] = {}
    lines, name = iter(change.splitlines(keepends=True)), ""
    for line in lines:
        if line.startswith("+++ "):
            name = line[4:].strip()
        elif line.startswith("@@ "):
            (first, old), (_, new) = (_place(word) for word in line.split()[1:3])
            hunk = (first - (old > 0), [next(lines)[1:] for _ in range(old)], [next(lines)[1:] for _ in range(new)])
            pages.setdefault(name, []).append(hunk)
    yield from pages.items()


def _place(word: str) -> tuple[int, int]:
    """(line, how many) of `-3,2` or `+3`."""
    first, comma, count = word[1:].partition(",")
    return int(first), int(count) if comma else 1


def _diff(name: str, before: str, after: str) -> Iterator[str]:
    lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
    return difflib.unified_diff(*lines, fromfile=name, tofile=name, n=0)


def _is_wanted(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(name.startswith(one) or one.startswith(name) for one in wanted)


if __name__ == "__main__":
    sys.exit(main())
