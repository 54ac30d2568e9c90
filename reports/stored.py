"""Comparisons stored under reports/h200: the rows of each, and what was said of it. `rejudge.py` judges them anew.

What is not stored is taken so that it claims less. `trust/` has medians of blocks: how much the steps of a block differ
is unknown there, so that the machine's least spread stands for it until the rows show more. A block whose time is not
stored lasts a second; rounds whose launch is not stored are of one launch.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from comparison import Block, rounds_of, rows_of  # beside this program
from rivals import timings_of
from scipy.special import stdtrit

from amptune.measure.results.outcome import Failure, Measurement, outcome_from_dict
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import STOCK, Policy
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["H200", "Said", "Stored", "everything", "former_ratio", "words_of"]

H200 = Path(__file__).resolve().parent / "h200"
KEPT = re.compile(r"the best rival: (.*), ([\d.]+)× \[([\d.]+), ([\d.]+)\]")
BARRED = " cannot win: "
# With this many launches or more, only what differs between them counted; a ratio was taken to differ by so much.
ENOUGH_LAUNCHES, LAUNCHES_DIFFER = 3, 0.005


@dataclass(frozen=True, kw_only=True)
class Said:
    """What was said: the policy that is faster, or the best rival of a baseline that was kept; its ratio; how sure.

    There is no policy and no ratio if a file names no rival.
    """

    policy: Policy | None
    ratio: Ratio | None
    faster: bool
    sure: str


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One comparison. Policies whose words are `barred` could not win; `later` is the ratio measured afterwards."""

    file: str
    workload: str
    name: str
    rows: Sequence[Row]
    baseline: Policy
    then: Said
    barred: frozenset[str] = frozenset()
    later: float | None = None


def everything(folder: Path = H200) -> Iterator[Stored]:
    """Yields every comparison under the folder whose blocks are stored."""
    for path in [*sorted(folder.glob("*.json")), *sorted(folder.glob("first/*.json"))]:
        yield _of_report(path.relative_to(folder), json.loads(path.read_text()))
    for path in sorted(folder.glob("trust/**/*.json")):
        for number, row in enumerate(json.loads(path.read_text())["rows"], 1):
            of = {"tunings": _of_tuning, "regret": _of_regret, "aa": _of_pairs}[path.stem]
            yield from of(f"{path.relative_to(folder)}, {number}", row)
    for path in [*sorted(folder.glob("rivals/**/*.json")), *sorted(folder.glob("search/*.json"))]:
        yield from _of_rivals(path.relative_to(folder), json.loads(path.read_text()))


def words_of(policy: Policy) -> str:
    return str(replace(policy, batch_size=None))


# --- files of compare.py -------------------------------------------------------------------------------------------


def _of_report(file: Path, data: Mapping[str, Any]) -> Stored:
    contenders = [(policy_from_dict(one["policy"]), one["vs_stock"]) for one in data["contenders"]]
    return Stored(
        file=str(file),
        workload=data["workload"],
        name="comparison",
        rows=rows_of(("0", map(_block, one)) for one in data["finals"]),
        baseline=contenders[0][0],
        then=_best_of((policy, _ratio(*found)) for policy, found in contenders[1:] if found),
    )


def _block(data: Mapping[str, Any]) -> Block:
    return policy_from_dict(data["policy"]), outcome_from_dict({k: v for k, v in data.items() if k != "policy"})


# --- files of trust.py ---------------------------------------------------------------------------------------------


def _of_tuning(file: str, row: Mapping[str, Any]) -> Iterator[Stored]:
    """Yields a tuning: its final comparison and its ablation are one table."""
    evidence, baseline = row["evidence"], policy_from_dict(row["evidence"]["baseline"]["policy"])
    rows: list[Row] = []
    for comparison in row["comparisons"]:
        rows += _of_medians(comparison, comparison["stage"], began_s=len(rows))
    stock = next(one.policy for one in rows if words_of(one.policy) == words_of(baseline))
    policies = {words_of(one.policy): one.policy for one in rows}
    claim = _ratio(evidence["speedup"], *evidence.get("speedup_ci95", (0.0, None)))
    findings = [finding["message"] for finding in evidence["findings"]]
    yield Stored(
        file=file,
        workload=row["workload"],
        name="tuning",
        rows=rows,
        baseline=stock,
        then=_claimed(policies[row["words"]], stock, claim, findings, policies, provisional="provisional" in evidence),
        later=row["verify"]["measured"]["speedup"] if row["words"] != words_of(STOCK) else None,
    )


def _of_regret(file: str, row: Mapping[str, Any]) -> Iterator[Stored]:
    found = [(policy_from_dict(one["policy"]), one["vs_stock"]) for one in row["contenders"]]
    stock = next(policy for policy, _ in found if words_of(policy) == words_of(STOCK))
    yield Stored(
        file=file,
        workload=row["workload"],
        name="comparison",
        rows=_of_medians(row["comparison"]),
        baseline=stock,
        then=_best_of((policy, _ratio(*ratio)) for policy, ratio in found if policy != stock),
    )


def _of_pairs(file: str, row: Mapping[str, Any]) -> Iterator[Stored]:
    """Yields each pair by itself: a policy, and the same with its batch size spelled out."""
    rows = _of_medians(row["comparison"])
    for pair in row["pairs"]:
        own = [one for one in rows if words_of(one.policy) == pair["policy"]]
        double = next(one.policy for one in own if one.policy.batch_size is not None)
        yield Stored(
            file=file,
            workload=row["workload"],
            name=f"itself: {pair['policy']}",
            rows=own,
            baseline=replace(double, batch_size=None),
            then=Said(policy=double, ratio=_ratio(*pair["ratio"]), faster=False, sure="no difference"),
            later=1.0,
        )


def _of_medians(comparison: Mapping[str, Any], stage: str = "", began_s: float = 0.0) -> list[Row]:
    """Returns rows of one step each, launch by launch and round by round."""
    of = [(policy_from_dict(one["policy"]), one["median_ms"]) for one in comparison["contenders"]]
    rounds = []
    for launch in range(max(len(medians) for _, medians in of)):
        for place in range(max(len(medians[launch]) for _, medians in of)):
            blocks = [(policy, medians[launch][place]) for policy, medians in of if place < len(medians[launch])]
            rounds.append((f"{stage} {launch}", [(policy, _of_one_step(ms)) for policy, ms in blocks]))
    return rows_of(rounds, began_s)


# --- files of rivals.py --------------------------------------------------------------------------------------------


def _of_rivals(file: Path, data: Mapping[str, Any]) -> Iterator[Stored]:
    """Yields the tuning, and the comparison with the oracle and the other tuner, which has raw samples alone."""
    tuning = data["amptune"]
    found = timings_of(data["comparison"]) if "comparison" in data else []
    own = policy_from_dict(tuning["policy"])
    if file.parts[0] == "rivals":  # the other file has another comparison of the same tuning
        rows = list(_of_timeline(tuning))
        policies = {words_of(one.policy): one.policy for one in rows}
        claim, findings = _ratio(*tuning["speedup"]), tuning["findings"]
        yield Stored(
            file=str(file),
            workload=data["workload"],
            name="tuning",
            rows=rows,
            baseline=STOCK,
            then=_claimed(own, STOCK, claim, findings, policies, provisional=tuning["provisional"]),
            barred=frozenset(text.partition(BARRED)[0] for text in findings if BARRED in text),
            later=_later(found, own),
        )
    if found:
        then = _best_of(_former_ratios(found))
        yield Stored(
            file=str(file), workload=data["workload"], name="comparison", rows=found, baseline=STOCK, then=then
        )


def _of_timeline(tuning: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the trials, then the blocks of each stage as one launch: where launches began is not stored."""
    trials, samples = iter(tuning["trials"]), tuning["trials"][0]["outcome"]["samples_per_step"]
    for entry in tuning["timeline"]:
        if entry["what"] == "trial":
            data = next(trials)
            policy, outcome = policy_from_dict(data["policy"]), outcome_from_dict(data["outcome"])
            yield Trial(number=0, policy=policy, outcome=outcome, seconds=0.0, moment_s=entry["at_s"]).row
        elif "ms_per_sample" in entry:
            policy, ms = policy_from_dict(entry["policy"]), entry["ms_per_sample"]
            outcome = Failure(kind="error", message="not stored") if ms is None else _of_one_step(samples * ms, samples)
            yield Row(policy=policy, outcome=outcome, run="", launch=entry["what"], moment_s=entry["at_s"])


def _later(rows: Sequence[Row], policy: Policy) -> float | None:
    """Returns the speed of stock PyTorch's time over the policy's; None if it is stock PyTorch."""
    ms = [statistics.geometric_mean(times) if (times := _times(rows, one)) else None for one in (STOCK, policy)]
    return None if policy == STOCK or ms[0] is None or ms[1] is None else ms[0] / ms[1]


def _times(rows: Sequence[Row], policy: Policy) -> list[float]:
    return [r.outcome.mean_ms for r in rows if r.policy == policy and isinstance(r.outcome, Measurement)]


# --- what was said -------------------------------------------------------------------------------------------------


def _claimed(
    policy: Policy,
    baseline: Policy,
    claim: Ratio,
    findings: Sequence[str],
    policies: Mapping[str, Policy],
    *,
    provisional: bool,
) -> Said:
    sure = "provisional" if provisional else "proven"
    if policy != baseline:
        return Said(policy=policy, ratio=claim, faster=True, sure=sure)
    rival = next((found for text in findings if (found := KEPT.search(text)) is not None), None)
    if rival is None:
        return Said(policy=None, ratio=None, faster=False, sure="provisional" if provisional else "not shown")
    ratio = _ratio(*map(float, rival.groups()[1:]))
    return Said(policy=policies.get(rival[1]), ratio=ratio, faster=False, sure="not shown")


def _best_of(found: Iterable[tuple[Policy, Ratio]]) -> Said:
    policy, ratio = max(found, key=lambda pair: pair[1].value)
    return Said(policy=policy, ratio=ratio, faster=ratio.low > 1, sure="proven" if ratio.low > 1 else "not shown")


def _former_ratios(rows: Sequence[Row]) -> Iterator[tuple[Policy, Ratio]]:
    """Yields each policy's ratio to stock PyTorch by the rules of then."""
    rounds = [
        (one[0].launch, {row.policy: row.outcome.mean_ms for row in one if isinstance(row.outcome, Measurement)})
        for one in rounds_of(rows)
    ]
    common = _common_spread([times for _, times in rounds])
    for policy in dict.fromkeys(row.policy for row in rows if row.policy != STOCK):
        pairs: dict[str, list[float]] = defaultdict(list)
        for launch, times in rounds:
            if policy in times and STOCK in times:
                pairs[launch].append(times[STOCK] / times[policy])
        if pairs:
            yield policy, former_ratio(list(pairs.values()), common, LAUNCHES_DIFFER)


def former_ratio(
    launches: Sequence[Sequence[float]], common: tuple[float, int] = (0.0, 0), differ: float = 0.0
) -> Ratio:
    """Returns a ratio as it was computed before one model judged the table; `launches` has the pairs of each launch.

    Three launches or more: Student's t over their median pairs. Fewer: over all pairs, by the `common` standard
    deviation of all policies if it has more degrees of freedom, twice as wide, and `differ` for what differs between
    launches.
    """
    logs = [[math.log(ratio) for ratio in launch] for launch in launches]
    centres = [statistics.median(launch) for launch in logs]
    if len(centres) >= ENOUGH_LAUNCHES:
        middle, half = _mean_and_half(centres)
        low, high = middle - half, middle + half
    else:
        middle, half = _mean_and_half([log for launch in logs for log in launch], common)
        half = math.hypot(2 * half, 2 * differ / math.sqrt(len(centres)))
        low, high = min(middle - half, *centres), max(middle + half, *centres)
    ends = [0.0 if math.isinf(low) else math.exp(low), math.inf if high > 700 else math.exp(high)]
    return Ratio(value=math.exp(middle), low=ends[0], high=ends[1], launches=len(centres))


def _mean_and_half(values: Sequence[float], common: tuple[float, int] = (0.0, 0)) -> tuple[float, float]:
    mean, freedom = statistics.fmean(values), len(values) - 1
    if not freedom:
        return mean, math.inf
    deviation = statistics.stdev(values)
    if common[1] > freedom:
        deviation, freedom = max(deviation, common[0]), common[1]
    return mean, float(stdtrit(freedom, 0.975)) * deviation / math.sqrt(len(values))


def _common_spread(rounds: Sequence[Mapping[Policy, float]]) -> tuple[float, int]:
    """Returns (standard deviation of a ratio between rounds, degrees of freedom), of the policies in all rounds."""
    policies = [policy for policy in rounds[0] if all(policy in times for times in rounds)]
    logs = [[math.log(times[policy] / times[other]) for times in rounds] for policy, other in combinations(policies, 2)]
    if len(rounds) < 2 or not logs:
        return 0.0, 0
    return math.sqrt(statistics.fmean(map(statistics.variance, logs))), (len(policies) - 1) * (len(rounds) - 1)


def _ratio(value: float, low: float | None, high: float | None) -> Ratio:
    return Ratio(value=value, low=low or 0.0, high=math.inf if high is None else high)


def _of_one_step(ms: float, samples: int = 1) -> Measurement:
    return Measurement(
        samples_per_step=samples,
        step_ms=(ms,),
        warmup_s=0.0,
        warmup_steps=0,
        peak_allocated_mib=1.0,
        peak_reserved_mib=1.0,
        losses=(),
    )
