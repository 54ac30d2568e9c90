"""The published ratios of half precision over FP32 by kind of GPU, as docs/will-it-pay.md has them.

    python reports/published.py

Lambda's summary has two models that are about as fast in both columns, from V100 to B200, while its raw logs have 2.1
times for one of them: AMP seems to have been off, and their rows are left out.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from pathlib import Path

FOLDER = Path(__file__).parent / "published"
SUMMARY, AMP_OFF = "lambda_train_fp32_vs_amp", ("tacotron2", "waveglow")
# The first pattern that a table's name of a GPU holds tells its kind.
KINDS = {
    "Pascal: GTX 1080 Ti": "1080Ti",
    "Volta: V100": "V100",
    "Turing: RTX 20xx, Quadro and Titan RTX": "20[78]0|Quadro|Titan",
    "A100": "A100",
    "Ada: RTX 4090, RTX 6000 Ada": "4090|Ada",
    "Hopper: H100, GH200": "H100|GH200",
    "Blackwell: B200": "B200",
    "other Ampere: RTX 30xx, A10, A40, RTX A": "30[789]0|A10|A40|A[456][05]00",
}
PAYS_FROM = 1.05


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for table in (SUMMARY, "lambda_raw_older_gpus_train", "dle_v100_a100_train_1gpu"):
        with (FOLDER / f"{table}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                ratio = row["amp_over_fp32" if "amp_over_fp32" in row else "amp_over_base"]
                if ratio and not (table == SUMMARY and row["workload"] in AMP_OFF):
                    kind = next(kind for kind, names in KINDS.items() if re.search(names, row["gpu"]))
                    ratios[kind].append(float(ratio))
    print("| GPU | rows | lowest | median | highest | rows below 1.05 |")
    print("|---|---|---|---|---|---|")
    for kind, found in ratios.items():
        median, few = statistics.median(found), sum(ratio < PAYS_FROM for ratio in found)
        print(f"| {kind} | {len(found)} | {min(found):.2f} | {median:.2f} | {max(found):.2f} | {few} |")


if __name__ == "__main__":
    main()
