"""Does a verdict hold when anyone measures again? Every question is put to fresh processes and a fresh study.

    python reports/trust.py --out reports/h200/trust --tunings 3 --budget 150 resnet50 vgg16 seresnext50
    python reports/trust.py --out reports/h200/trust --tunings 0 --compare-s 0 --aa 20

Three parts, each run alone where the others are given none:

- `--tunings N`: N times over all workloads, `amptune tune` and then `amptune verify` of what it wrote;
- `--compare-s S`: for each workload one interleaved comparison, S seconds long, of stock PyTorch, every policy that
  those tunings found and the fastest of the exhaustive grid measured earlier (`compare.py`): each policy's regret;
- `--aa N`: N comparisons of a policy with itself under two names, each until it is decided.

Writes OUT/WORKLOAD-N.policy.yaml, OUT/tunings.json, OUT/regret.json and OUT/aa.json, a row as each is done; rows that
are there already are kept, so several runs add up. `--table` only prints the summary of what is in OUT.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compare import earlier_grid  # beside this program
from comparison import launches_of, measured_in_turn

from amptune.errors import StudyError
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Measurement, Outcome
from amptune.measure.workers.source import Source
from amptune.policy.file_io import load
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.report.progress import progress_for
from amptune.search.plan.budget import Budget
from amptune.search.sampler.storage import recall
from amptune.search.table.effects import machine_of
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of
from amptune.workload.zoo import NAMES, workload

PREPARE_LIMIT_S = 300.0
AA_LIMIT_S = 110.0
# Of fewer launches nothing is said of how they differ.
ENOUGH_LAUNCHES = 3
AA_POLICIES = {
    "stock": STOCK,
    "tf32": Policy(fp32_math="tf32"),
    "amp-bf16": amp_recipe("bf16"),
    "amp-fp16": amp_recipe("fp16"),
}
# What a training loop reaches without its waits and copies agrees with the tuner to this, or is not explained by them.
EXPLAINED = 0.02
REASONS = ("input-bound", "copy-bound", "host-bound", "launch-differs", "step-differs")
# Findings that stand in other columns.
USUAL = ("faster", "keep", "end-to-end", *REASONS)


@dataclass(frozen=True)
class Ran:
    """One `amptune` command: its exit code, what it printed, and its progress with the second each line came in."""

    exit_code: int
    seconds: float
    stdout: str
    log: list[str]


@dataclass(frozen=True)
class Place:
    """Where results are written, earlier grids lie, and measuring is done."""

    out: Path
    grid: Path
    device: str | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[], metavar="WORKLOAD", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tunings", type=int, default=3, metavar="N", help="of each workload (default: 3)")
    parser.add_argument("--budget", type=float, default=150.0, metavar="S", help="seconds a tuning (default: 150)")
    parser.add_argument("--verify-budget", type=float, default=60.0, metavar="S", help="default: 60")
    parser.add_argument("--compare-s", type=float, default=60.0, metavar="S", help="default: 60; 0 for none")
    parser.add_argument("--grid", type=Path, metavar="DIR", help="where earlier grids lie (default: the one above OUT)")
    parser.add_argument("--grid-best", type=int, default=3, metavar="N", help="so many of a grid (default: 3)")
    parser.add_argument("--aa", type=int, default=0, metavar="N", help="comparisons of a policy with itself")
    parser.add_argument("--aa-workloads", nargs="+", default=["vgg16", "resnet18", "mlp3"], metavar="WORKLOAD")
    parser.add_argument(
        "--aa-policies", nargs="+", default=["stock"], choices=AA_POLICIES, help="each on each workload"
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--table", action="store_true", help="only print the summary of what is in OUT")
    arguments = parser.parse_args()
    place = Place(arguments.out, arguments.grid or arguments.out.parent, arguments.device)
    place.out.mkdir(parents=True, exist_ok=True)
    workloads = arguments.workloads or ["resnet50", "vgg16", "seresnext50"]
    if not arguments.table:
        for name in workloads * arguments.tunings:
            row = tuned_and_verified(name, place, arguments.budget, arguments.verify_budget)
            add_row(place.out / "tunings.json", row)
        for name in workloads if arguments.compare_s else ():
            add_row(place.out / "regret.json", regret(name, place, arguments.compare_s, arguments.grid_best))
        pairs = itertools.product(arguments.aa_policies, arguments.aa_workloads)
        for policy, name in itertools.islice(itertools.cycle(pairs), arguments.aa):
            add_row(place.out / "aa.json", compared_with_itself(name, AA_POLICIES[policy], place))
    print(summary(place.out))
    return 0


def tuned_and_verified(name: str, place: Place, budget_s: float, verify_s: float) -> dict[str, Any]:
    """One tuning in a fresh process and study, and its policy verified in another process."""
    target = f"amptune.workload.zoo:{name}"
    number = sum(row["workload"] == name for row in rows_of(place.out, "tunings"))
    path = place.out / f"{name}-{number}.policy.yaml"
    row: dict[str, Any] = {"workload": name, "repetition": number, "started": _now()}
    with tempfile.TemporaryDirectory() as study:
        ran = run_amptune(
            ["tune", target, "--budget", f"{budget_s:g}s", "-o", str(path), "--study", study], place.device
        )
        row["command"] = f"amptune tune {target} --budget {budget_s:g}s -o {path.name}"
        row |= {"exit_code": ran.exit_code, "seconds": ran.seconds, "log": ran.log}
        row["comparisons"] = comparisons_in(Path(study))
        log = Path(study) / "workers.log"
        if ran.exit_code and log.exists():
            print(log.read_text()[-3000:], file=sys.stderr)
    if not path.exists():
        return row
    found = load(path)
    row |= {"words": _words(found.policy), "policy": policy_to_dict(found.policy)}
    row |= {"valid_for": dict(found.valid_for), "evidence": dict(found.evidence)}
    ran = run_amptune(["verify", str(path), target, "--budget", f"{verify_s:g}s", "--json"], place.device)
    said = json.loads(ran.stdout) if ran.stdout.strip() else {}
    row["verify"] = {
        "command": f"amptune verify {path.name} {target} --budget {verify_s:g}s --json",
        "exit_code": ran.exit_code,
        "seconds": ran.seconds,
        **{key: value for key, value in said.items() if key not in ("schema", "file", "exit_code")},
    }
    return row


def run_amptune(arguments: Sequence[str], device: str | None) -> Ran:
    """Runs the command as a user would. What it prints appears on stderr as well."""
    command = [sys.executable, "-m", "amptune", *arguments, *(["--device", device] if device else [])]
    log: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as stdout:
        with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603  # ours
            for line in process.stderr or ():
                log.append(f"{time.monotonic() - started:6.1f} s  {line.rstrip()}")
                print(log[-1], file=sys.stderr)
        seconds = round(time.monotonic() - started, 1)
        stdout.seek(0)
        printed = stdout.read()
    print(f"{printed}exit code {process.returncode}, {seconds} s\n", file=sys.stderr)
    return Ran(process.returncode, seconds, printed, log)


def regret(name: str, place: Place, seconds: float, grid_best: int) -> dict[str, Any]:
    """How much faster the fastest known policy is than each one that tuning found, measured side by side.

    Which one is the fastest is read off the same measurements. That flatters it a little, so a regret is
    overstated rather than understated.
    """
    started, seed = _now(), len(rows_of(place.out, "regret"))
    with comparing(name, place) as evaluator, progress_for(sys.stderr) as observer:
        prepared = evaluator.prepare(PREPARE_LIMIT_S)
        stock = replace(STOCK, batch_size=prepared.subject.batch_size)
        names = named_policies(name, stock, place, grid_best)
        budget = Budget(seconds=seconds)
        rows = measured_in_turn(evaluator, prepared, list(names), budget, observer, seed=seed)
    verdict = judged(rows, stock, prepared.hardware.device)
    best = verdict.contenders[0].policy
    hardware = prepared.hardware
    return {
        "workload": name,
        "started": started,
        "hardware": hardware.name,
        "software": {"torch": hardware.software.torch, "cudnn": hardware.software.cudnn},
        "budget_s": seconds,
        "seconds": round(budget.spent_s, 1),
        "launches": len(launches_of(rows)),
        "contenders": [
            {
                "names": names[contender.policy],
                "words": _words(contender.policy),
                "policy": policy_to_dict(contender.policy),
                "step_ms": contender.step_ms,
                "vs_stock": contender.vs_baseline and numbers(contender.vs_baseline),
                "best_over_this": numbers(verdict.scores.between(best, contender.policy)),
                "failure": str(contender.failure) if contender.failure else None,
            }
            for contender in verdict.contenders
        ],
        "comparison": comparison_of(rows),
    }


def named_policies(name: str, stock: Policy, place: Place, grid_best: int) -> dict[Policy, list[str]]:
    """Who is compared, and under which names: stock, what the tunings found, the fastest of the grid."""
    names: dict[Policy, list[str]] = defaultdict(list)
    names[stock].append("stock")
    for row in rows_of(place.out, "tunings"):
        if row["workload"] == name and "policy" in row:
            names[policy_from_dict(row["policy"])].append(f"tuning {row['repetition']}")
    if (place.grid / f"{name}.json").exists():
        fastest = fastest_of(earlier_grid(name, place.grid))
        for i, policy in enumerate(fastest[:grid_best]):
            names[policy].append(f"grid {i + 1}")
    return names


def fastest_of(grid: Mapping[Policy, Outcome]) -> list[Policy]:
    """The grid's policies, fastest first; of those that run the same kernels, one.

    Under autocast and with no module kept in FP32, the FP32 math mode has nothing to act on.
    """
    alive = {policy: outcome for policy, outcome in grid.items() if isinstance(outcome, Measurement)}
    ranked = sorted(alive, key=lambda policy: alive[policy].mean_ms)
    return list(dict.fromkeys(p if p.autocast == "off" else replace(p, fp32_math="stock") for p in ranked))


def compared_with_itself(name: str, policy: Policy, place: Place) -> dict[str, Any]:
    """A policy beside itself, the batch size left out and spelled out: two names and processes, one truth."""
    started, seed = _now(), len(rows_of(place.out, "aa"))
    double = replace(policy, batch_size=workload(name).batch_size)
    with comparing(name, place) as evaluator, progress_for(sys.stderr) as observer:
        prepared, budget = evaluator.prepare(PREPARE_LIMIT_S), Budget(seconds=AA_LIMIT_S)
        rows = measured_in_turn(evaluator, prepared, [policy, double], budget, observer, seed=seed)
    ratio = judged(rows, policy, prepared.hardware.device).scores.between(double, policy)
    if ratio is None:
        sys.exit(f"{name}: {policy} was not measured twice")
    pair = {
        "policy": str(policy),
        "ratio": numbers(ratio),
        "launches": ratio.launches,
        "shows_a_difference": ratio.shows_a_difference,
    }
    return {
        "workload": name,
        "started": started,
        "seconds": round(budget.spent_s, 1),
        "pairs": [pair],
        "comparison": comparison_of(rows),
    }


def judged(rows: Sequence[Row], baseline: Policy, device: str) -> Verdict:
    verdict = verdict_of(rows, baseline, machine_of(device))
    if verdict is None:
        sys.exit(f"{baseline} was not measured: nothing can be held against it")
    return verdict


@contextmanager
def comparing(name: str, place: Place) -> Iterator[WorkerEvaluator]:
    with tempfile.TemporaryDirectory() as folder:
        source = Source(target=f"amptune.workload.zoo:{name}")
        with WorkerEvaluator(source, place.device, Path(folder) / "workers.log") as evaluator:
            yield evaluator


def comparisons_in(study: Path) -> list[dict[str, Any]]:
    """The timings of a tuning, trials included, as one comparison; none if it did not get so far."""
    try:
        return [comparison_of(recall(study).table, "tuning")]
    except StudyError:
        return []


def comparison_of(rows: Sequence[Row], stage: str = "verify") -> dict[str, Any]:
    """Each contender's medians, a list a launch, and what the blocks say of the machine."""
    launches = launches_of(rows)
    found: dict[Policy, list[list[float]]] = defaultdict(lambda: [[] for _ in launches])
    for row in rows:
        if isinstance(row.outcome, Measurement):
            found[row.policy][launches.index(row.launch)].append(round(row.outcome.mean_ms, 4))
    measured = [row.outcome for row in rows if isinstance(row.outcome, Measurement)]
    return {
        "stage": stage,
        "contenders": [
            {"words": _words(policy), "policy": policy_to_dict(policy), "median_ms": medians}
            for policy, medians in found.items()
        ],
        "blocks": len(rows),
        "failed": [f"{_words(row.policy)}: {row.outcome}" for row in rows if row.outcome not in measured],
        "unsteady": sum(not m.steady for m in measured),
        "discarded": dict(Counter(why for m in measured for why in m.discarded)),
        "contaminated_by": dict(Counter(why for m in measured for why in m.contaminated_by)),
        "sm_clock_mhz": _range(m.sm_clock_mhz for m in measured),
        "temperature_c": _range(m.temperature_c for m in measured),
    }


def summary(out: Path) -> str:
    """The tables of what is in OUT, as Markdown."""
    tunings, comparisons, aa = (rows_of(out, part) for part in ("tunings", "regret", "aa"))
    texts = [
        tunings_table(tunings, comparisons) if tunings else "",
        regret_table(comparisons) if comparisons else "",
        aa_table(aa) if aa else "",
        noise_table([*tunings, *comparisons, *aa]),
    ]
    return "\n\n".join(text for text in texts if text)


def tunings_table(tunings: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> str:
    regrets = {
        (row["workload"], policy_from_dict(entry["policy"])): entry["best_over_this"]
        for row in comparisons
        for entry in row["contenders"]
    }
    heads = (
        "workload", "budget", "policy found", "claimed", "launches", "verified", "holds", "regret", "training loop",
        "findings", "took, verify",
    )  # fmt: skip
    ordered = sorted(tunings, key=lambda row: (row["workload"], row["repetition"]))
    return _table(heads, [_tuning_cells(row, regrets) for row in ordered])


def _tuning_cells(row: Mapping[str, Any], regrets: Mapping[tuple[str, Policy], Sequence[float]]) -> list[str]:
    budget = row["command"].partition("--budget ")[2].partition(" ")[0]
    if "policy" not in row:
        return [row["workload"], budget, f"none: exit code {row['exit_code']}", *["-"] * 7, f"{row['seconds']:.0f} s"]
    evidence, verify = row["evidence"], row["verify"]
    measured = verify.get("measured") or {}
    behind = regrets.get((row["workload"], policy_from_dict(row["policy"])))
    codes = [finding["code"] for finding in evidence["findings"]]
    codes += [f"verify: {finding['code']}" for finding in verify.get("findings", []) if "hold" not in finding["code"]]
    return [
        row["workload"],
        budget,
        row["words"],
        _times(evidence["speedup"], evidence.get("speedup_ci95")),
        str(evidence.get("launches", "-")),
        _times(measured.get("speedup"), measured.get("speedup_ci95")),
        "yes" if verify.get("holds") else f"no (exit code {verify['exit_code']})",
        _percents([100 * (value - 1) if value else value for value in behind]) if behind else "-",
        _loop(evidence),
        ", ".join(code for code in codes if code not in USUAL) or "-",
        f"{row['seconds']:.0f}, {verify['seconds']:.0f} s",
    ]


def _loop(evidence: Mapping[str, Any]) -> str:
    """How far the loop is from the tuner's figure, and how far from the step alone in a process, without its waits."""
    findings, timing = evidence["findings"], evidence.get("end_to_end", {})
    found = next((finding for finding in findings if finding["code"] == "end-to-end"), None)
    if found is None:
        return "-"
    reasons = [
        finding["code"] + (f" {finding['share']:.0%}" if "share" in finding else "")
        for finding in findings
        if finding["code"] in REASONS
    ]
    words = f"{found['off_percent']:+.1f} %" + (f" ({', '.join(reasons)})" if reasons else "")
    if abs(found["off_percent"]) <= 100 * EXPLAINED:
        return words
    alone = timing.get("alone_samples_per_s", found["tuner_samples_per_s"])
    without = timing["samples_per_s"] / alone / (1 - found["wait_share"] - found["copy_share"]) - 1
    where = "of the step in the same process, " if "alone_samples_per_s" in timing else ""
    return f"{words}; {100 * without:+.1f} % {where}without waits and copies"


def regret_table(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Every contender of each comparison, best first."""
    lines = [
        [
            row["workload"],
            ", ".join(entry["names"]),
            entry["words"],
            entry["failure"] or f"{entry['step_ms']:.3f}",
            _times(*_value_and_interval(entry["vs_stock"])),
            _percents([100 * (value - 1) if value else value for value in entry["best_over_this"]]),
            str(row["launches"]),
        ]
        for row in comparisons
        for entry in row["contenders"]
    ]
    return _table(("workload", "who", "policy", "ms", "vs. stock", "behind the best", "launches"), lines)


def aa_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for name in [*sorted({row["workload"] for row in rows}), "**all**"]:
        pairs = [pair for row in rows if name in (row["workload"], "**all**") for pair in row["pairs"]]
        widths = [(pair["ratio"][2] - pair["ratio"][1]) / 2 / pair["ratio"][0] for pair in pairs if pair["ratio"][2]]
        off = [abs(pair["ratio"][0] - 1) for pair in pairs]
        shown = [pair for pair in pairs if pair["shows_a_difference"]]
        lines.append(
            [
                name,
                str(len(pairs)),
                str(len(pairs) - len(shown)),
                f"{100 * statistics.median(widths):.2f} %" if widths else "-",
                f"{100 * statistics.median(off):.2f} %, {100 * max(off):.2f} %",
                ", ".join(_times(*_value_and_interval(pair["ratio"]), digits=4) for pair in shown) or "-",
            ]
        )
    heads = ("A policy beside itself", "pairs", "no difference shown", "± (median)", "off by (median, most)", "shown")
    return _table(heads, lines)


def noise_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much a policy's blocks of steps differ in a launch, and its launches among each other. Medians."""
    spreads: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        for comparison in [*row.get("comparisons", []), *([row["comparison"]] if "comparison" in row else [])]:
            for entry in comparison["contenders"]:
                if (found := spread_of(entry["median_ms"])) is not None:
                    spreads[row["workload"]].append(found)
    lines = []
    for name, found_there in sorted(spreads.items()):
        within, between = zip(*found_there, strict=True)
        cells = [f"{100 * statistics.median(each):.2f} %, {100 * max(each):.2f} %" for each in (within, between)]
        lines.append([name, str(len(found_there)), *cells])
    heads = ("workload", "policies watched", "SD of blocks in a launch (median, most)", "SD of launches (median, most)")
    return _table(heads, lines) if lines else ""


def spread_of(launches: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """(SD of blocks around their launch's mean, SD of the launches' medians), relative; None for too few."""
    logs = [[math.log(ms) for ms in launch] for launch in launches if len(launch) > 1]
    if len(logs) < ENOUGH_LAUNCHES:
        return None
    freedom = sum(len(launch) - 1 for launch in logs)
    within = math.sqrt(sum((len(launch) - 1) * statistics.variance(launch) for launch in logs) / freedom)
    return within, statistics.stdev(statistics.median(launch) for launch in logs)


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Appends the row to those of the file; a program that is ended meanwhile leaves the file as it was."""
    data = {"schema": "amptune.trust/1", "rows": [*rows_of(path.parent, path.stem), row]}
    part = path.with_suffix(".part")
    part.write_text(_indented(data) + os.linesep)
    part.replace(path)


def rows_of(out: Path, part: str) -> list[dict[str, Any]]:
    path = out / f"{part}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def numbers(ratio: Ratio | None) -> list[float | None]:
    """[value, low, high], None for what is infinite or not known."""
    values = (math.inf,) * 3 if ratio is None else (ratio.value, ratio.low, ratio.high)
    return [round(value, 5) if math.isfinite(value) else None for value in values]


def _indented(data: Any) -> str:
    """JSON with its lists of numbers on one line each."""
    text = json.dumps(data, indent=1)
    return re.sub(r"\[\s+(?:(?:-?[\d.e+-]+|null),?\s+)+\]", lambda found: " ".join(found[0].split()), text)


def _range(values: Iterable[int | None]) -> list[int] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None


def _words(policy: Policy) -> str:
    return str(replace(policy, batch_size=None))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _value_and_interval(found: Sequence[float | None] | None) -> tuple[float | None, Sequence[float | None] | None]:
    return (None, None) if found is None else (found[0], found[1:])


def _times(value: float | None, interval: Sequence[float | None] | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    limits = (
        "" if interval is None else ", ".join("∞" if limit is None else f"{limit:.{digits}f}" for limit in interval)
    )
    return f"{value:.{digits}f}× [{limits}]" if limits else f"{value:.{digits}f}×"


def _percents(found: Sequence[float | None]) -> str:
    value, low, high = ("∞" if number is None else f"{number:.2f}" for number in found)
    return f"{value} % [{low}, {high}]"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
