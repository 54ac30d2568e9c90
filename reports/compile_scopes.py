"""What does torch.compile gain with the loss compiled too, and with whole steps recorded over it? Six policies in turn.

    python reports/compile_scopes.py reports/first_models.py:gpt2 reports/foreign_models.py:vit_small_patch16_224 \
        --out scopes.jsonl

Each trains by the README's one call (`plain_loop.py`) in a process of its own, in bf16 with a fused optimizer. Appends
a line for each policy as a model is done, and leaves out models that stand there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plain_loop import Arm, LimitReachedError, in_turn  # beside this program

from amptune.policy.settings import Policy
from amptune.search.plan.budget import Budget

ARMS: dict[str, dict[str, Any]] = {
    "reduce-overhead": {"compile": "reduce-overhead"},
    "default": {"compile": "default"},
    "default, recorded": {"compile": "default", "cuda_graphs": "step"},
    "step": {"compile": "step"},
    "step, recorded": {"compile": "step", "cuda_graphs": "step"},
    "recorded": {"cuda_graphs": "step"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="for the whole command")
    asked = parser.parse_args()
    limit = Budget(seconds=asked.limit)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    common = Policy(autocast="bf16", memory_format="channels_last", fused_optimizer=True)
    known = {json.loads(line)["target"] for line in asked.out.read_text().splitlines()} if asked.out.exists() else set()
    for target in (one for one in asked.targets if one not in known):
        with tempfile.TemporaryDirectory() as folder:
            arms = [
                Arm(names=(name,), caches=Path(folder, name), policy=replace(common, **settings))
                for name, settings in ARMS.items()
            ]
            try:
                rows = in_turn(arms, target, None, limit, seed=target)
            except LimitReachedError:
                return
        with asked.out.open("a") as file:
            file.writelines(json.dumps({"target": target, "card": card, **row}) + "\n" for row in rows)
        for row in rows:
            ms = f"{statistics.fmean(row['ms']):.2f} ms" if row["ms"] else row["failure"]
            print(target, row["names"][0], ms, row["peak_mib"], "MiB", row["warm_s"], "s", flush=True)


if __name__ == "__main__":
    main()
