"""Holds predictions from an H100 to an H200, and back, to what both did with the eight models of `foreign.py`.

    python reports/predicted_cards.py --out reports/published/h100_and_h200.json

What half precision was worth on one card (stock PyTorch's step over that of the bf16 recipe, in the plain loop,
median of all launches) is told to `amptune predict --measured`; what it says of the other card is compared with what
that card did. The evidence is that of `foreign.py`, under `h100/` and `h200/`. It needs torchvision, timm and
transformers, but no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CARDS = ("H100", "H200")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    worth = {card: worth_on(HERE / card.lower() / "foreign") for card in CARDS}
    rows = [
        predicted(model, known, other, worth[known][model], worth[other][model])
        for model in sorted(worth["H100"].keys() & worth["H200"].keys())
        for known, other in (CARDS, CARDS[::-1])
    ]
    asked.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    held = sum(row["low"] <= row["true"] <= row["high"] for row in rows)
    right = sum(row["verdict"] == ("pays" if row["true"] >= 1.05 else "does not") for row in rows)
    width = statistics.median(row["high"] / row["low"] for row in rows)
    for row in rows:
        print(
            "{model}: {known} {measured:.2f} → {other}: {low:.2f} to {high:.2f}, {verdict}; true {true:.2f}".format(
                **row
            )
        )
    print(f"of {len(rows)} ranges {held} hold, median width {width:.2f}; {right} verdicts are right")


def worth_on(folder: Path) -> dict[str, float]:
    """Returns for each model how many times as fast as stock PyTorch the bf16 recipe is."""
    found = {}
    for file in folder.glob("*.jsonl"):
        ratios = []
        ms: dict[Any, dict[str, float]] = defaultdict(dict)
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if row["what"] == "launch" and row.get("ms"):
                key = row["host"], row["budget_s"], row["launch"]
                ms[key] |= dict.fromkeys(row["names"], statistics.median(row["ms"]))
        ratios = [one["stock"] / one["amp bf16"] for one in ms.values() if {"stock", "amp bf16"} <= one.keys()]
        found[file.stem] = statistics.median(ratios)
    return found


def predicted(model: str, known: str, other: str, measured: float, true: float) -> dict[str, Any]:
    """Returns what `amptune predict` says of the other card, beside the truth."""
    command = [sys.executable, "-m", "amptune", "predict", f"{HERE / 'foreign_models.py'}:{model}", "--json"]
    command += ["--gpu", other, "--measured", f"{known}={measured:.3f}"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)  # noqa: S603
    half = told["predictions"][0]["half"]
    return {"model": model, "known": known, "measured": measured, "other": other, "true": true, **half}


if __name__ == "__main__":
    main()
