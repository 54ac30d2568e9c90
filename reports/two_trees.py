"""What do another version's answers and this one's give? Both tune each model, then their policies train in turn.

    git worktree add /tmp/before 6b92e44
    python reports/two_trees.py /tmp/before convnext_tiny llama_150m --budget 60 --out reports/NAME/rows.jsonl

A model is one of `foreign_models.py`, or a target. Each tuning has empty caches of torch.compile and a study of its
own; which version tunes first alternates. Then stock PyTorch and both policies train in the README's loop
(`plain_loop.py`), in turn, in fresh processes. Appends a line for each tuning, and one for each way to train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from plain_loop import Arm, compile_caches, in_turn  # beside this program

import amptune
from amptune.search.plan.budget import Budget

REPORTS = Path(__file__).resolve().parent
MORE_S, LOOP_S = 45.0, 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the root of the other version's checkout")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    trees = [("before", asked.before.resolve()), ("now", REPORTS.parent)]
    for place, model in enumerate(asked.models):
        target = model if ":" in model else f"{REPORTS / 'foreign_models.py'}:{model}"
        with tempfile.TemporaryDirectory() as folder:
            arms = [Arm(names=("stock",), caches=Path(folder) / "stock", policy=amptune.Policy())]
            for name, tree in trees[:: -1 if place % 2 else 1]:
                own = Path(folder) / name
                line = tuned(tree, target, asked.budget, own)
                note(asked.out, {"model": model, "budget_s": asked.budget, "tree": name, **line})
                if line["code"] == 0:
                    answer = amptune.load(own / "policy.yaml")
                    assert isinstance(answer, amptune.PolicyFile)  # noqa: S101  # what `tune` writes
                    arms.append(Arm(names=(name,), caches=own, policy=replace(answer.policy, batch_size=None)))
            rows = in_turn(arms, target, None, Budget(seconds=LOOP_S, started=time.monotonic()), seed=model)
        for row in rows:
            note(asked.out, {"model": model, "budget_s": asked.budget, "loop": True, **row})
        print(model, {row["names"][0]: round(statistics.fmean(row["ms"]), 2) for row in rows if row["ms"]}, flush=True)


def tuned(tree: Path, target: str, budget_s: float, folder: Path) -> dict[str, Any]:
    """Tunes by the version in a checkout; returns its exit code, what it claims and the last lines it said."""
    policy = folder / "policy.yaml"
    command = [sys.executable, "-m", "amptune", "tune", target, "--compile", "--budget", f"{budget_s:g}s", "-v"]
    command += ["--study", str(folder / "study"), "-o", str(policy)]
    with compile_caches(folder):
        paths = os.pathsep.join([str(tree), str(REPORTS), os.environ.get("PYTHONPATH", "")])
        ended = subprocess.run(  # noqa: S603  # our own command
            command,
            env={**os.environ, "PYTHONPATH": paths},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=budget_s + MORE_S,
            check=False,
        )
    claimed = None
    if ended.returncode == 0:
        answer = amptune.load(policy)
        evidence = answer.evidence if isinstance(answer, amptune.PolicyFile) else {}
        claimed = [evidence.get("speedup"), *(evidence.get("speedup_ci95") or [])]
    return {"code": ended.returncode, "claimed": claimed, "said": ended.stdout.splitlines()}


def note(out: Path, line: dict[str, Any]) -> None:
    with out.open("a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


if __name__ == "__main__":
    main()
