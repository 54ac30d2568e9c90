"""Are claims true on a CPU with one of its two cores busy? Tunes and verifies where the true gain is planted.

    python reports/busy_claims.py --out reports/busy --lanes 8 --limit 600
    python reports/busy_claims.py --out reports/busy --table

A lane has two cores; a process that never rests keeps one of them busy. A step is products of matrices in FP64, which
no setting changes, with a small model beside them; with `fifth`, autocast leaves a fifth of them out, which gains a
little more than 1.2 times. Thirty times each: tunings of 30 s where nothing is gained, of 90 s where a fifth is;
`verify` of the true claim, 1.2, beside the busy core and without it; and of a claim raised by 20 %. Appends a line to
OUT/claims.jsonl as each is done, and does nothing that stands there again; --limit ends the command in time, and the
next one goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from json_lines import append  # beside this program
from lanes import EARLIER_S, Job, ProcessLane, end_with_parent, run
from torch import nn

import amptune
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import amp_recipe
from amptune.search.plan.budget import Budget
from amptune.search.table.ratio import Ratio
from amptune.search.verification import verify

GAIN, RAISED = 1.2, 1.44
CORES_A_LANE = 2
TIMES = 30
MORE_S = 15.0
# A fifth fewer of them, rounded so that the claim is true with what else a step does.
PRODUCTS, FEWER, SIDE = 24, 19, 320


@dataclass(frozen=True)
class Question:
    """What is asked `TIMES` times. Of a tuning, `workload` says what is true; of a verification, what is claimed."""

    name: str
    workload: str
    budget_s: float
    claimed: float | None = None
    is_busy: bool = True


QUESTIONS = (
    Question("tune, nothing gained", "nothing", 30.0),
    Question("tune, a fifth gained", "fifth", 90.0),
    Question("verify, true", "fifth", 90.0, GAIN),
    Question("verify, true, quiet", "fifth", 90.0, GAIN, is_busy=False),
    Question("verify, raised", "fifth", 90.0, RAISED),
)


def nothing() -> amptune.Workload:
    return _planted(PRODUCTS)


def fifth() -> amptune.Workload:
    return _planted(FEWER)


def _planted(under_autocast: int) -> amptune.Workload:
    left, out = torch.rand(SIDE, SIDE, dtype=torch.float64), torch.empty(SIDE, SIDE, dtype=torch.float64)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def work() -> None:
        for _ in range(under_autocast if torch.is_autocast_enabled("cpu") else PRODUCTS):
            torch.mm(left, left, out=out)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        work()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return amptune.Workload(
        model=lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        batch=lambda n: (torch.randn(n, 16), torch.randint(4, (n,))),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loss=loss,
        batch_size=8,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lanes", type=int, default=1, metavar="N", help="pairs of cores to use (default 1)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="for the whole command")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    evidence = arguments.out / "claims.jsonl"
    if arguments.part:
        question = next(one for one in QUESTIONS if one.name == arguments.part[0])
        append(evidence, asked(question, int(arguments.part[1])))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        ask_all(evidence, arguments.lanes, Budget(seconds=arguments.limit))
    print(table(lines_of(evidence)))
    return 0


def ask_all(evidence: Path, lanes: int, limit: Budget) -> None:
    """Asks what was not asked yet, the longest question first."""
    done = {(line["question"], line["number"]) for line in lines_of(evidence)}
    jobs = [
        Job(
            name=f"{question.name} {number}",
            command=(sys.executable, __file__, "--out", str(evidence.parent), "--part", question.name, str(number)),
            expected_s=question.budget_s + MORE_S,
        )
        for number in range(TIMES)
        for question in QUESTIONS
        if (question.name, number) not in done
    ]

    def next_job(_running: Sequence[Job], _failed: Sequence[Job], left_s: float) -> Job | None:
        fitting = [job for job in jobs if job.expected_s <= left_s - EARLIER_S]
        if fitting:
            jobs.remove(fitting[0])
        return fitting[0] if fitting else None

    cores = sorted(os.sched_getaffinity(0))
    pairs = [frozenset(cores[CORES_A_LANE * lane : CORES_A_LANE * (lane + 1)]) for lane in range(lanes)]
    run([ProcessLane(gpu=None, cores=pair) for pair in pairs], next_job, limit)


def lines_of(evidence: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in evidence.read_text().splitlines()] if evidence.exists() else []


def asked(question: Question, number: int) -> dict[str, Any]:
    began_s = time.monotonic()
    target = f"{Path(__file__).resolve()}:{question.workload}"
    with busy_core(question.is_busy), tempfile.TemporaryDirectory() as folder:
        if question.claimed is None:
            study = Path(folder) / "study"
            decision = amptune.tune(target, budget_s=question.budget_s, device="cpu", study=study, seed=number)
            answer = "keep" if decision.verdict.keeps_the_baseline else str(decision.winner)
            ratio: Ratio | None = decision.speedup
        else:
            file = PolicyFile(policy=amp_recipe("bf16"), evidence={"speedup": question.claimed})
            found = verify(file, target, budget=Budget(seconds=question.budget_s), device="cpu")
            answer, ratio = str(found.answer), found.speedup
    return {
        "question": question.name,
        "number": number,
        "answer": answer,
        "speedup": None if ratio is None else [round(one, 4) for one in (ratio.value, ratio.low, ratio.high)],
        "seconds": round(time.monotonic() - began_s, 1),
    }


@contextmanager
def busy_core(is_busy: bool) -> Iterator[None]:
    process = multiprocessing.get_context("fork").Process(target=_never_rest, daemon=True)
    if is_busy:
        process.start()
    try:
        yield
    finally:
        if is_busy:
            process.kill()


def _never_rest() -> None:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    while True:
        pass


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns, as Markdown, how often each answer was given; a tuning that claims any gain counts as "claimed"."""
    rows = ["| question | asked | answers |", "|---|---|---|"]
    for question in QUESTIONS:
        answers = [line["answer"] for line in lines if line["question"] == question.name]
        told = [answer if question.claimed or answer == "keep" else "claimed" for answer in answers]
        counts = ", ".join(f"{told.count(one)} {one}" for one in sorted(set(told)))
        rows.append(f"| {question.name} | {len(answers)} | {counts} |")
    return "\n".join(rows)


if __name__ == "__main__":
    if "--part" in sys.argv:
        end_with_parent()
    sys.exit(main())
