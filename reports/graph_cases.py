"""Does training with recorded CUDA graphs differ from plain training, raise or hang? Hard cases, and a verdict on each.

    python reports/graph_cases.py --out cases.jsonl --jobs 6
    python reports/graph_cases.py --only 'streams' 'lstm*'
    python reports/graph_cases.py --device cpu

Trains each case of `graph_models/` plainly, then with `GraphedModel`, with the same seeds and batches, and compares
what each step returned, and weights, buffers and gradients. If a case changes something from outside, it does so at
step 12 of 40, so that comparisons of a recording with the model's own pass follow (at its calls 16 and 32). Verdicts:

    same (recorded)    and nothing was said
    same (by itself)   the model ran without a recording at least in the end; a finding says why
    ended              it differed, until a finding said so
    wrong              it differs, and nothing said so until then
    raised             graphed raises where plain does not
    hung, crashed      no end within --limit; the end of the process
    plain fails        says nothing about recordings
    noisy              plain training differs from itself by as much

Cases share processes. One that hangs or ends its process, or leaves the GPU broken, costs the others a new one. Run
what has a bad verdict again with `--only NAME`, alone in its process. `--only` takes names and groups, with `*`.
Appends a row to FILE as each case is done, and does nothing that stands there. On a CPU the recorder of the tests is
used, which tells only if plain training and this program work; cases that need CUDA are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from graph_models import CASES, Case  # beside this program
from graph_trial import BY_ITSELF, CRASHED, ENDED, HUNG, PLAIN_FAILS, RAISED, SAME, VERDICTS, Row, row_of

# A process has this long until its first case begins.
START_LIMIT_S = 180.0
READY, PLAIN_IS_OVER = "ready", "plain is over"
_spawn = multiprocessing.get_context("spawn")


def main() -> int:
    arguments = parsed()
    chosen = [case for case in CASES.values() if is_asked_for(case, arguments.only)]
    if not chosen:
        sys.exit(f"no case is called {', '.join(arguments.only)}; there are {', '.join(CASES)}")
    rows = stored(arguments.out)
    left = [case for case in chosen if can_run(case, arguments.device) and case.name not in rows]
    for row in ran(left, arguments):
        rows[row["name"]] = row
    print(summary([rows[case.name] for case in chosen if case.name in rows]))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of a case or a group, with * for any")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, appended to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes beside each other (default 1)")
    parser.add_argument("--limit", type=float, default=45.0, metavar="SECONDS", help="for a case (default 45)")
    return parser.parse_args()


def is_asked_for(case: Case, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, one) for name in (case.name, case.group) for one in patterns)


def can_run(case: Case, device: str) -> bool:
    has_package = not case.package or importlib.util.find_spec(case.package) is not None
    return has_package and not (case.gpu and not device.startswith("cuda"))


def stored(out: Path | None) -> dict[str, Row]:
    if out is None or not out.exists():
        return {}
    return {row["name"]: row for row in map(json.loads, out.read_text().splitlines())}


# --- running -------------------------------------------------------------------------------------------------------


def ran(cases: Sequence[Case], arguments: argparse.Namespace) -> Iterator[Row]:
    """Runs the cases in processes beside each other; prints, stores and yields each row as it comes."""
    lots: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for lot in lots_of(cases):
        lots.put(lot)
    done: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
    lanes = [Lane(arguments.device, arguments.limit, lots, done.put) for _ in range(max(1, arguments.jobs))]
    threads = [threading.Thread(target=lane.work, daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    running = len(threads)
    with nullcontext() if arguments.out is None else arguments.out.open("a") as file:
        while running:
            row = done.get()
            if row is None:
                running -= 1
                continue
            print(line_of(row), flush=True)
            if file is not None:
                print(json.dumps(row), file=file, flush=True)
            yield row


def lots_of(cases: Sequence[Case]) -> list[list[str]]:
    """Returns names that go to one process: what needs a package that is slow to import is first, and together."""
    packages = sorted({case.package for case in cases} - {""})
    together = [[case.name for case in cases if case.package == package] for package in packages]
    return together + [[case.name] for case in cases if not case.package]


@dataclass
class Lane:
    """Takes lots of cases, and gives them to a process; begins another if that ended or was ended."""

    device: str
    limit_s: float
    lots: queue.SimpleQueue[list[str]]
    done: Callable[[Row | None], None]
    _process: SpawnProcess | None = None
    _connection: Connection[Any, Any] | None = None
    _served: int = field(default=0)

    def work(self) -> None:
        """Goes on until no lot is left; then says None."""
        try:
            while True:
                for name in self.lots.get_nowait():
                    self.done(self._row(name))
        except queue.Empty:
            self._end()
        finally:
            self.done(None)

    def _row(self, name: str) -> Row:
        """Asks once more, in a fresh process, if an earlier case may have been what ended this one."""
        was_first = self._served == 0
        row = self._asked(name)
        is_of_device = row["verdict"] == RAISED and "CUDA" in row["reason"]
        if (is_of_device or row["verdict"] in (CRASHED, PLAIN_FAILS)) and not was_first:
            self._end()
            row = self._asked(name)
        return row

    def _asked(self, name: str) -> Row:
        start_s = time.perf_counter()
        plain = True
        verdict = reason = ""
        try:
            connection = self._connected()
            connection.send(name)
            self._served += 1
            while connection.poll(self.limit_s):
                heard = connection.recv()
                if isinstance(heard, dict):
                    if heard["leaves_device_broken"]:
                        self._end()
                    return heard
                plain = False
            verdict, reason = HUNG, f"no end within {self.limit_s:g} s"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            if self._process is not None:
                self._process.join(5)
            verdict, reason = CRASHED, f"the process ended with {self._process and self._process.exitcode}"
        self._end()
        if plain:
            verdict, reason = PLAIN_FAILS, f"{verdict}: {reason}"
        seconds = round(time.perf_counter() - start_s, 2)
        return {
            "name": name, "class": CASES[name].group, "verdict": verdict, "reason": reason, "seconds": seconds,
        }  # fmt: skip

    def _connected(self) -> Connection[Any, Any]:
        if self._connection is None:
            self._connection, other = _spawn.Pipe()
            self._process = _spawn.Process(target=serve, args=(other, self.device), daemon=True)
            self._process.start()
            other.close()
            if not self._connection.poll(START_LIMIT_S) or self._connection.recv() != READY:
                raise EOFError
        return self._connection

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process, self._connection, self._served = None, None, 0


def serve(connection: Connection[Any, Any], device_name: str) -> None:
    """Trains cases by name until the other end closes. The GPU is broken if nothing runs on it any more."""
    device = torch.device(device_name)
    if device.type == "cpu":
        torch.set_num_threads(1)
    connection.send(READY)
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        row = row_of(CASES[name], device, lambda: connection.send(PLAIN_IS_OVER))
        connection.send(
            {**row, "device": device_name, "torch": torch.__version__, "leaves_device_broken": not works(device)}
        )


def works(device: torch.device) -> bool:
    """Returns True if the device computes, and draws, as it does for a case in a fresh process."""
    try:
        drawn = torch.rand(8, device=device)
        return bool((drawn + 1 - drawn).sum().round().item() == 8)
    except RuntimeError:
        return False


# --- telling -------------------------------------------------------------------------------------------------------


def line_of(row: Row) -> str:
    worst = f" by {row['worst']:.2g}" if isinstance(row.get("worst"), float) else ""
    where = f", {row['where']}{worst}" if row["verdict"] not in (SAME, BY_ITSELF) and row.get("where") else ""
    begun = row.get("differs_from_step")
    since = f", from step {begun}" if where and begun is not None else ""
    return f"{row['name']}: {row['verdict']}{where}{since}: {row['reason']} ({row['seconds']:g} s)"


def summary(rows: Sequence[Row]) -> str:
    """Returns a table of verdicts by group, and the names of what is bad."""
    used = [verdict for verdict in VERDICTS if any(row["verdict"] == verdict for row in rows)]
    groups = list(dict.fromkeys(row["class"] for row in rows))
    counts = {group: Counter(row["verdict"] for row in rows if row["class"] == group) for group in groups}
    counts["all"] = Counter(row["verdict"] for row in rows)
    heads = ["class", "cases", *used]
    lines = [[group, str(own.total()), *(str(own[verdict]) for verdict in used)] for group, own in counts.items()]
    widths = [max(len(line[column]) for line in (heads, *lines)) for column in range(len(heads))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (heads, *lines)]
    bad = [verdict for verdict in used if verdict not in (SAME, BY_ITSELF, ENDED)]
    named = [f"{verdict}: {', '.join(row['name'] for row in rows if row['verdict'] == verdict)}" for verdict in bad]
    return "\n".join(["", *table, *named])


if __name__ == "__main__":
    sys.exit(main())
