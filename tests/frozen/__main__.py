"""Holds the tree against what amptune did when it was last recorded (tests/frozen/recorded).

    python -m frozen check [PAGE ...]            what differs, as a diff; exit code 1 if anything does
    python -m frozen record [PAGE ...]           records it anew: a change made on purpose, whose reason the commit says
    python -m frozen replay --out F [--start]    other tunings: --trouble oom=0.3 --budget 120 --tunings 40

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
# What is recorded, and the commit that `replay --start` compares with.
RECORDED, START = HERE / "recorded", HERE / "START"
# Where the starting commit is checked out, beside the tree.
BESIDE = REPOSITORY / ".frozen"


def main() -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m frozen", description=__doc__, formatter_class=words)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, told in (("check", "hold the tree against what was recorded"), ("record", "record it anew")):
        command = commands.add_parser(name, help=told)
        command.add_argument("pages", nargs="*", metavar="PAGE", help="such as help.txt or decisions; all by default")
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
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if arguments.command == "replay":
        return replay(arguments)
    return held(arguments.pages) if arguments.command == "check" else record(arguments.pages)


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
    """Prints what differs from the recording."""
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


def record(wanted: Sequence[str]) -> int:
    """Records the pages anew; those that no longer are go."""
    from frozen.decisions import versions

    now = found(wanted)
    for name in _expected().keys() - now.keys():
        if _is_wanted(name, wanted):
            (RECORDED / name).unlink()
    for name, text in {**now, "versions.txt": f"{versions()}\n"}.items():
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
    """The recorded pages by name."""
    pages = {str(path.relative_to(RECORDED)): _portable(path.read_text()) for path in RECORDED.rglob("*.*")}
    return {name: page for name, page in sorted(pages.items()) if name != "versions.txt"}


def _portable(page: str) -> str:
    """The page with long numbers rounded: another processor may give other last digits."""
    return re.sub(r"\d+\.\d{10,}", lambda number: f"{float(number[0]):.9g}", page)


def _diff(name: str, before: str, after: str) -> Iterator[str]:
    lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
    return difflib.unified_diff(*lines, fromfile=name, tofile=name, n=0)


def _is_wanted(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(name.startswith(one) or one.startswith(name) for one in wanted)


if __name__ == "__main__":
    sys.exit(main())
