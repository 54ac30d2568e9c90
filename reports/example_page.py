"""Makes the example of a report's page, docs/example-report.html, from a tuning on an H200 whose raw samples are kept.

    python reports/example_page.py           # writes the page
    python reports/example_page.py --check   # exits with 1 if that page is not what would be written

The tuning is `h200/resnet50.json`: its trials, and the rounds of its comparison, each in processes of their own. It was
made before studies kept the numerics gate's figures, and the page says that these are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from amptune.measure.results.outcome import outcome_from_dict
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import STOCK
from amptune.policy.yaml_text import read
from amptune.report.page import page_of
from amptune.search.decide.study_report import findings_of, study_report_of
from amptune.search.sampler.records import StudyRecord, TuningRecord
from amptune.search.table.objective import THROUGHPUT
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

HERE = Path(__file__).resolve().parent
SOURCE, PAGE = HERE / "h200" / "resnet50.json", HERE.parent / "docs" / "example-report.html"
# Seconds between two rounds of the comparison, which the file does not say.
ROUND_S = 10.0


def record_of(content: dict[str, Any], valid_for: dict[str, str], began: str) -> StudyRecord:
    """Returns a tuning, as `SOURCE` holds it, as a study."""
    own = content["trials"][0]["samples_per_step"]
    trials, moment_s = [], 0.0
    for number, one in enumerate(content["trials"]):
        moment_s += one["seconds"]
        outcome = outcome_from_dict(_outcome(one))
        policy = policy_from_dict(one["policy"])
        trials.append(
            Trial(number=number, policy=policy, outcome=outcome, seconds=one["seconds"], run="0", moment_s=moment_s)
        )
    tuning = TuningRecord(
        run="0",
        began=began,
        workload=content["workload"],
        target=f"amptune.workload.zoo:{content['workload']}",
        folder="reports/h200",
        hardware=content["hardware"],
        batch_size=own,
        baseline=STOCK,
        objective=THROUGHPUT,
        device="cuda",
        software=tuple(content["software"].items()),
        memory_mib=float(valid_for["nvidia.com/gpu.memory"]),
        valid_for=tuple(valid_for.items()),
    )
    return StudyRecord(
        name=f"{content['workload']}, whose raw samples are in reports/h200/{SOURCE.name} of amptune's repository",
        where=f".amptune/amptune.workload.zoo-{content['workload']}",
        tunings=(tuning,),
        trials=tuple(trials),
        rows=tuple(_rows(content["finals"], own, moment_s)),
    )


def _rows(finals: list[list[dict[str, Any]]], own: int, began_s: float) -> Iterator[Row]:
    """Yields the blocks of the comparison; there, the workload's own batch size stands in each policy."""
    for launch, blocks in enumerate(finals):
        for one in blocks:
            policy = policy_from_dict(one["policy"])
            yield Row(
                policy=replace(policy, batch_size=None if policy.batch_size == own else policy.batch_size),
                outcome=outcome_from_dict(_outcome(one)),
                run="0",
                launch=f"comparison {launch}",
                moment_s=began_s + ROUND_S * (launch + 1),
            )


def _outcome(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name not in ("policy", "seconds")}


def page() -> str:
    file: Any = read(str(SOURCE.with_suffix(".policy.yaml"))).data
    record = record_of(json.loads(SOURCE.read_text()), file["valid_for"], file["evidence"]["tuned_on"])
    study_report = study_report_of(record, THROUGHPUT)
    return page_of(study_report, findings_of(study_report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    written = page()
    if not parser.parse_args().check:
        PAGE.write_text(written, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != written:
        print(f"{PAGE}: not what {SOURCE} says; `python reports/example_page.py` writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
