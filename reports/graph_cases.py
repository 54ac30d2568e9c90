"""Does training with recorded CUDA graphs differ from plain training, raise or hang? Hard cases, and a verdict on each.

    python reports/graph_cases.py --out cases.jsonl --jobs 12
    python reports/graph_cases.py --only streams 'cosines*'
    python reports/graph_cases.py --device cpu
    python reports/graph_cases.py --blind

Trains each case of `tests/runtime/graphs/hard_cases/` plainly, then with `GraphedModel`, with the same seeds and
batches, and compares what each step returned, weights, buffers and gradients. The verdicts are told in
`hard_cases/trial.py`; added to them are

    hung, crashed      no end within --limit; the end of the process

Each case tells what is expected of it; the summary names the others. Cases share processes, but one that hangs, crashes
or leaves the GPU broken ends its own. `--only` takes names and kinds, with `*`. Appends a row to FILE as each case is
done, and does nothing that stands there. A CPU has the recorder of the tests; cases that need CUDA are left out.
`--blind` leaves out what recorded passes look for among the objects of the host, to tell what comparison alone finds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as LimitError
from concurrent.futures import as_completed
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from pebble import ProcessExpired, ProcessPool

# The cases stand beside the tests, as the recorder for a CPU does.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "runtime"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "runtime" / "graphs"))

from hard_cases import CASES, Case
from hard_cases.trial import Row, is_expected, row_of
from taped import TapeRecorder

from amptune.runtime.graphs import capture
from amptune.runtime.graphs.graphed_model import GraphedModel
from amptune.runtime.graphs.host_effects import DeviceState

HUNG, CRASHED = "hung", "crashed"
# The exit code of a process whose GPU does not compute any more.
BROKEN = 70


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of a case or a kind, with * for any")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, appended to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes beside each other (default 1)")
    parser.add_argument("--blind", action="store_true", help="do not look at objects of the host")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="for a case (default 60)")
    arguments = parser.parse_args()
    chosen = [case for case in CASES.values() if is_asked_for(case, arguments.only)]
    if not chosen:
        parser.error(f"no case is called {', '.join(arguments.only)}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or Path(folder, "cases.jsonl")
        known = stored(out)
        left = [case for case in chosen if can_run(case, arguments.device) and case.name not in known]
        run(left, out, arguments.device, arguments.jobs, arguments.limit, blind=arguments.blind)
        rows = stored(out)
    print(summary([rows[case.name] for case in chosen if case.name in rows]))
    return 0


def is_asked_for(case: Case, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, one) for name in (case.name, case.kind) for one in patterns)


def can_run(case: Case, device: str) -> bool:
    has_package = not case.package or importlib.util.find_spec(case.package) is not None
    return has_package and (device.startswith("cuda") or not (case.gpu or case.on_cpu is None))


def stored(out: Path) -> dict[str, Row]:
    return {row["name"]: row for row in map(json.loads, out.read_text().splitlines())} if out.exists() else {}


def run(cases: Sequence[Case], out: Path, device: str, jobs: int, limit_s: float, *, blind: bool) -> None:
    """Runs the cases in processes beside each other, which store rows; stores one for a case that ends its process."""
    started = look_away if blind else None
    with ProcessPool(max_workers=jobs, initializer=started, context=multiprocessing.get_context("spawn")) as pool:
        # Those with packages that are slow to import are first.
        ordered = sorted(cases, key=lambda case: not case.package)
        futures: dict[Any, Case] = {
            pool.schedule(run_one, args=(case.name, out, device), timeout=limit_s): case for case in ordered
        }
        for future in as_completed(futures):
            case = futures[future]
            row: Row = {"name": case.name, "kind": case.kind, "seconds": limit_s, "is_expected": False}
            try:
                future.result()
            except LimitError:
                store({**row, "verdict": HUNG, "reason": f"no end within {limit_s:g} s"}, out)
            except ProcessExpired as end:
                if end.exitcode != BROKEN:
                    store({**row, "verdict": CRASHED, "reason": f"the process ended with {end.exitcode}"}, out)


def store(row: Row, out: Path) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    mark = "" if row["is_expected"] else " (not expected)"
    print(f"{row['name']}: {row['verdict']}{mark}: {row['reason']} ({row['seconds']:g} s)", flush=True)


def look_away() -> None:
    """Has recorded passes put back random generators and buffers, and look at nothing else."""

    @contextmanager
    def blind(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
        device, python, cpu = DeviceState(model), random.getstate(), torch.get_rng_state()
        try:
            yield device.put_back
        finally:
            device.put_back()
            random.setstate(python)
            torch.set_rng_state(cpu)

    vars(capture)["without_effects"] = blind


def run_one(name: str, out: Path, device_name: str) -> None:
    """Trains the case, stores its row, and ends the process if the GPU is broken then."""
    device = torch.device(device_name)
    if device.type == "cpu":
        torch.set_num_threads(1)
    row = row_of(CASES[name], device, GraphedModel if device.type == "cuda" else on_tape)
    row |= {"device": device_name, "torch": torch.__version__}
    store({**row, "is_expected": is_expected(row, CASES[name])}, out)
    if not works(device):
        os._exit(BROKEN)


def on_tape(model: torch.nn.Module, say: Any) -> GraphedModel:
    return GraphedModel(model, say, recorder=TapeRecorder, device_type="cpu")


def works(device: torch.device) -> bool:
    """Returns True if the device computes, and draws, as it does for a case in a fresh process."""
    try:
        drawn = torch.rand(8, device=device)
        return bool((drawn + 1 - drawn).sum().round().item() == 8)
    except RuntimeError:
        return False


def summary(rows: Sequence[Row]) -> str:
    """Returns how many of each kind had each verdict, and the names of what is not as expected."""
    counts = Counter((row["kind"], row["verdict"]) for row in rows)
    lines = [f"{kind}: {count} {verdict}" for (kind, verdict), count in sorted(counts.items())]
    others = [f"not expected: {row['name']}: {row['verdict']}" for row in rows if not row["is_expected"]]
    return "\n".join(["", *lines, f"{len(rows)} cases, {len(rows) - len(others)} as expected", *others])


if __name__ == "__main__":
    sys.exit(main())
