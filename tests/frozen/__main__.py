"""Holds the tree against what amptune did when it was last recorded (tests/frozen/recorded).

    python -m frozen check [PAGE ...]            what differs, as a diff; exit code 1 if anything does
    python -m frozen record [PAGE ...]           records it anew: a change made on purpose, whose reason the commit says
    python -m frozen decide SEED [--tunings N]   the table for other seeds; another checkout's can be held beside it

Run with `tests/` on the path: PYTHONPATH=tests python -m frozen check.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

RECORDED = Path(__file__).resolve().parent / "recorded"


def main() -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m frozen", description=__doc__, formatter_class=words)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, told in (("check", "hold the tree against what was recorded"), ("record", "record it anew")):
        command = commands.add_parser(name, help=told)
        command.add_argument("pages", nargs="*", metavar="PAGE", help="such as help.txt; all by default")
    decide = commands.add_parser("decide", help="other simulated tunings")
    decide.add_argument("seed", type=int, help="of the first; the others count on from it")
    decide.add_argument("--tunings", type=int, default=42)
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if arguments.command == "decide":
        from frozen.decisions import cases, rows_of

        print(rows_of(tuple(islice(cases(arguments.seed), arguments.tunings))), end="")
        return 0
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
        "traces.txt": decisions.traces,
        "decisions.txt": decisions.decisions,
    }
    pages = {name: make() for name, make in makers.items() if _is_wanted(name, wanted)}
    if _is_wanted("schemas/", wanted):
        pages |= commands.schemas()
    return {name: _portable(page) for name, page in pages.items()}


def held(wanted: Sequence[str]) -> int:
    """Prints what differs from the recording."""
    from frozen.decisions import versions

    expected, now = expected_pages(), found(wanted)
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
    for name in expected_pages().keys() - now.keys():
        if _is_wanted(name, wanted):
            (RECORDED / name).unlink()
    for name, text in {**now, "versions.txt": f"{versions()}\n"}.items():
        path = RECORDED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def expected_pages() -> dict[str, str]:
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
