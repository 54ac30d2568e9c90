"""amptune held against the oracle and against pytorch-autotune: how good an answer, in how much of the time?

    pip install pytorch-autotune==2.0.0
    python reports/rivals.py resnet50 vgg16 --out reports/h200/rivals --oracle reports/h200/oracle --limit 580
    python reports/rivals.py --out reports/h200/rivals --oracle reports/h200/oracle --table

For each workload, in this order, each with empty caches of torch.compile: `amptune.tune`; pytorch-autotune on the same
model, batch, loss and optimizer with the same budget, in a process of its own; and one interleaved comparison of stock
PyTorch, the AMP recipe in bf16 and fp16, amptune's policy, what pytorch-autotune chose as a policy, and the oracle's
three fastest rows (`oracle.py`, run before). The step that pytorch-autotune returned is timed by itself as well, in
its own process, since a policy says it nearly and not exactly: its backward pass is compiled under autocast.

Writes OUT/WORKLOAD.json behind each of the three parts, and does not repeat a part that stands there, so that a
command that was cut short, by `--limit` or otherwise, goes on where it ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune import Bridged, answer_of, policy_of_autotune  # beside this program
from comparison import compile_beside, effects_on, measured_in_turn, rounds_of, rows_of
from oracle import EFFORT, Oracle, Row, compile_caches, machine_of, read, require_the_same

from amptune.errors import AmptuneError
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Measurement, Outcome
from amptune.measure.workers.source import Source
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.report.progress import progress_for
from amptune.search.api import tune
from amptune.search.events import (
    Compiling,
    ContenderMeasured,
    Event,
    PolicyJudged,
    SearchEnded,
    SearchStarted,
    StepStarted,
    TrialEnded,
    WorkloadBuilt,
)
from amptune.search.plan.budget import Budget
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row as Timing
from amptune.search.table.verdict import Verdict, verdict_of
from amptune.workload.zoo import NAMES

SCHEMA = "amptune.rivals/1"
SEED = 1
ORACLE_ROWS = 3
# Compiling for the first time, before the comparison begins, may take as long as in the oracle.
COMPILE_LIMIT_S = 300.0
# What each part takes at the most beyond its budget.
TUNING_MORE_S, COMPARISON_MORE_S = 25.0, 30.0
# It often ends long before its budget is spent; one that the command's limit ends is left for another command.
SHORTEST_AUTOTUNE_S = 60.0
SHORTEST_FINALS_S = 30.0
UNKNOWN_COMPILE_S = 60.0
# How an answer is approached: how near the best trial is after so long, and when it stays so near.
EARLY_S, NEAR = 60.0, 1.03


# --- in this process ---------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--oracle", type=Path, metavar="DIR", help="what oracle.py wrote")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for each tuner (default 150)")
    parser.add_argument("--finals", type=float, default=150.0, help="seconds for the comparison (default 150)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="for the whole command")
    parser.add_argument("--space", default=None, help="search space for amptune, a name or a file")
    parser.add_argument("--device", default=None)
    parser.add_argument("--caches", type=Path, metavar="DIR", help="of the oracle's, for the comparison")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    parser.add_argument("--only-autotune", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_autotune:
        run_autotune(arguments.workloads[0], arguments.budget, arguments.device, arguments.out)
        return 0
    if arguments.oracle is None:
        parser.error("--oracle is missing")
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = False if arguments.table else compare_all(arguments)
    print(table(arguments.out, arguments.oracle))
    return int(failed)


def compare_all(arguments: argparse.Namespace) -> bool:
    """Whether any could not be done."""
    if importlib.util.find_spec("pytorch_autotune") is None:
        sys.exit("pytorch-autotune is not there: pip install pytorch-autotune==2.0.0")
    limit = Budget(seconds=arguments.limit)
    failed = False
    for name in arguments.workloads or NAMES:
        try:
            report(name, arguments, limit)
        except AmptuneError as error:  # the others are compared all the same
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
    return failed


def report(name: str, arguments: argparse.Namespace, limit: Budget) -> None:
    """Does the parts that are missing and fit into the time left, each written down before the next."""
    path = arguments.out / f"{name}.json"
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schema": SCHEMA, "workload": name}
    oracle = read(arguments.oracle / f"{name}.jsonl")
    parts: dict[str, Callable[[], dict[str, Any] | None]] = {
        "amptune": lambda: tuned(name, arguments, limit),
        "autotune": lambda: autotuned(name, arguments, limit),
        "comparison": lambda: compared(name, data, oracle, arguments, limit),
    }
    for part, act in parts.items():
        if part in data:
            continue
        found = act()
        if found is None:
            print(f"{name}: {part} is left for another command", file=sys.stderr)
            return
        data[part] = found
        write(path, data)


def tuned(name: str, arguments: argparse.Namespace, limit: Budget) -> dict[str, Any] | None:
    """What amptune found, and when it found what; None where the command's limit leaves no time for it."""
    if limit.left_s < arguments.budget + TUNING_MORE_S:
        return None
    timeline = Timeline()
    with compile_caches() as folder, progress_for(sys.stderr) as progress:

        def observe(event: Event) -> None:
            timeline(event)
            progress(event)

        decision = tune(
            f"amptune.workload.zoo:{name}",
            budget_s=arguments.budget,
            space=arguments.space,
            compile=True,
            device=arguments.device,
            study=folder / "study",
            observer=observe,
        )
        seconds = timeline.now_s()
    return {
        "budget_s": arguments.budget,
        "seconds": round(seconds, 1),
        "policy": policy_to_dict(replace(decision.winner, batch_size=None)),
        "speedup": [decision.speedup.value, decision.speedup.low, decision.speedup.high],
        "provisional": decision.provisional,
        "findings": [str(finding) for finding in decision.findings],
        "hardware": decision.hardware.name,
        "software": {"torch": decision.hardware.software.torch, "cudnn": decision.hardware.software.cudnn},
        "timeline": timeline.entries,
        "trials": [
            Row(policy=trial.policy, outcome=trial.outcome, seconds=trial.seconds).to_line()
            for trial in decision.trials
        ],
    }


class Timeline:
    """An observer that notes what happened when, in seconds since it was made."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.entries: list[dict[str, Any]] = []

    def now_s(self) -> float:
        return time.monotonic() - self._started_s

    def __call__(self, event: Event) -> None:
        match event:
            case WorkloadBuilt():
                self._note("workload-built")
            case StepStarted():
                self._note(event.stage, of=event.what)
            case PolicyJudged():
                self._note("judged", policy=policy_to_dict(event.judgement.policy))
            case SearchStarted():
                self._note("search-started", policies=event.size)
            case Compiling():
                self._note("compiling", policy=policy_to_dict(event.policy))
            case SearchEnded():
                self._note("search-ended", because=event.because)
            case TrialEnded():
                self._measured("trial", event.trial.policy, event.trial.outcome)
            case ContenderMeasured():
                self._measured(event.stage, event.policy, event.outcome)

    def _measured(self, kind: str, policy: Policy, outcome: Outcome) -> None:
        ms = outcome.mean_ms / outcome.samples_per_step if isinstance(outcome, Measurement) else None
        self._note(kind, policy=policy_to_dict(policy), ms_per_sample=ms)

    def _note(self, kind: str, **more: Any) -> None:
        self.entries.append({"at_s": round(self.now_s(), 2), "what": kind, **more})


def autotuned(name: str, arguments: argparse.Namespace, limit: Budget) -> dict[str, Any] | None:
    """What pytorch-autotune found, or how it ended; None where the command's limit ends it or leaves no time."""
    if limit.left_s < SHORTEST_AUTOTUNE_S:
        return None
    with compile_caches() as folder:
        answer = folder / "answer.json"
        command = [sys.executable, __file__, name, "--only-autotune", "--out", str(answer)]
        command += ["--budget", str(arguments.budget)]
        command += ["--device", arguments.device] if arguments.device else []
        return answer_of(command, answer, folder / "log", arguments.budget, limit.left_s)


def compared(
    name: str, data: Mapping[str, Any], oracle: Oracle | None, arguments: argparse.Namespace, limit: Budget
) -> dict[str, Any] | None:
    """All of them interleaved, launch after launch; None where the command's limit leaves no time for it.

    Raises `AmptuneError` where there is no oracle for this machine.
    """
    if oracle is None:
        raise AmptuneError(f"there is no oracle to compare with: python reports/oracle.py {name}")
    named = named_policies(data, oracle)
    policies = list(dict.fromkeys(named.values()))
    finals_s = min(arguments.finals, limit.left_s - first_compile_s(policies, oracle.rows) - COMPARISON_MORE_S)
    if finals_s < SHORTEST_FINALS_S:
        return None
    device = arguments.device
    with (
        compile_caches(arguments.caches) as folder,
        progress_for(sys.stderr) as progress,
        WorkerEvaluator(Source(target=f"amptune.workload.zoo:{name}"), device, folder / "workers.log") as evaluator,
    ):
        prepared = evaluator.prepare(COMPILE_LIMIT_S)
        machine = machine_of(name, prepared, 0.0)
        require_the_same(oracle.machine, machine, Path(f"the oracle of {name}"))
        effort = replace(EFFORT, time_limit_s=COMPILE_LIMIT_S)
        # Compiled once before, beside one another, so that the launches find it in the caches.
        graphs = [policy for policy in policies if policy.compile != "off"]
        compile_beside(evaluator, graphs, COMPILE_LIMIT_S)
        tried = [(policy, evaluator.measure(policy, effort)) for policy in graphs]
        budget = Budget(seconds=finals_s)
        rows = measured_in_turn(evaluator, prepared, policies, budget, progress, tried=tried, seed=SEED)
    return {
        "machine": machine,
        "finals_s": round(finals_s, 1),
        "contenders": {contender: policy_to_dict(policy) for contender, policy in named.items()},
        "rounds": [
            {"launch": one[0].launch, "rows": [_line(row.policy, row.outcome) for row in one]}
            for one in rounds_of(rows)
        ],
    }


def first_compile_s(policies: Sequence[Policy], rows: Sequence[Row]) -> float:
    """How long the compiled ones take to be compiled for the first time, by the oracle's longest of their modes.

    Both compile several beside one another: a row's seconds are its share.
    """
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.policy.compile] = max(row.seconds, seconds.get(row.policy.compile, 0.0))
    modes = [policy.compile for policy in policies if policy.compile != "off"]
    return sum(seconds.get(mode, UNKNOWN_COMPILE_S) for mode in modes)


def named_policies(data: Mapping[str, Any], oracle: Oracle) -> dict[str, Policy]:
    """Who is compared, by name; several names may be of one policy."""
    named = {"stock": STOCK, "amp bf16": amp_recipe("bf16"), "amp fp16": amp_recipe("fp16")}
    named["amptune"] = policy_from_dict(data["amptune"]["policy"])
    chosen = data["autotune"].get("config")
    if chosen is not None:
        named["pytorch-autotune"] = policy_of_autotune(chosen, fused=data["autotune"]["fused"])
    fastest = oracle.fastest(ORACLE_ROWS)
    return named | {f"oracle {place}": row.policy for place, row in enumerate(fastest, start=1)}


# --- in the process of pytorch-autotune --------------------------------------------------------------------------


def run_autotune(name: str, budget_s: float, device: str | None, answer: Path) -> None:
    """Tunes by pytorch-autotune, and times the step it returns; the answer is written behind each."""
    import torch

    from amptune.changes.layout import convert_batch
    from amptune.changes.tensor_tree import map_tensors
    from amptune.workload.zoo import workload as bundled

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    workload = bundled(name)
    torch.manual_seed(0)
    batch = map_tensors(lambda tensor: tensor.to(device), workload.batch(workload.batch_size))
    bridged = Bridged(workload, batch)
    started_s = time.monotonic()
    result = bridged.search(budget_s, device)
    found = {
        "search_s": round(time.monotonic() - started_s, 1),
        "config": result.config.to_dict(),
        "fused": bool(result.optimizer.defaults.get("fused")),
        "report": result.report.to_dict(),
    }
    write(answer, found)
    if result.config.channels_last:
        batch = convert_batch(batch, "channels_last")  # once, so that no step has to
    own_ms = timed(lambda: bridged.step(result, batch), device)
    write(answer, {**found, "own_step_ms": [round(ms, 4) for ms in own_ms]})


def timed(step: Callable[[], object], device: str) -> list[float]:
    """Its steps' times in ms, warm."""
    import torch

    from amptune.measure.bench.clocks import clock_for

    clock = clock_for(torch.device(device))
    clock.time_steps(step, 10)
    slowest_ms = max(clock.time_steps(step, 5))
    return list(clock.time_steps(step, max(10, min(200, int(2000 / slowest_ms)))))


# --- what came of it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One workload's figures. `ms` are by contender, None for one that failed; ratios above 1 are slower or faster.

    `vs_oracle` is amptune's time over the oracle's best, `vs_amp` and `vs_autotune` are amptune's speed over theirs;
    None where there is nothing to compare with.
    """

    workload: str
    ms: Mapping[str, float | None]
    own_step_ms: float | None
    vs_oracle: Ratio | None
    vs_amp: Ratio | None
    vs_autotune: Ratio | None
    tuning_s: float
    oracle_s: float
    autotune_s: float
    early: float | None
    near_s: float | None
    policy: Policy
    autotune_failure: str | None

    @property
    def share_of_time(self) -> float:
        return self.tuning_s / self.oracle_s


def summary_of(data: Mapping[str, Any], oracle: Oracle) -> Summary:
    """The figures behind the raw samples."""
    names = {name: policy_from_dict(policy) for name, policy in data["comparison"]["contenders"].items()}
    rows = timings_of(data["comparison"])
    verdict = verdict_of(rows, STOCK, effects_on(data["comparison"]["machine"]["hardware"]))
    ms = {name: _step_ms(rows, policy) for name, policy in names.items()}
    own, autotune = names["amptune"], data["autotune"]
    best = _fastest(ms, "oracle")
    recipe = _fastest(ms, "amp ")
    early, near_s = approach(data["amptune"]["timeline"], own)
    return Summary(
        workload=data["workload"],
        ms={**ms, "oracle": ms[best] if best else None},
        own_step_ms=statistics.median(autotune["own_step_ms"]) if "own_step_ms" in autotune else None,
        vs_oracle=_ratio(verdict, names.get(best or ""), own),
        vs_amp=_ratio(verdict, own, names.get(recipe or "")),
        vs_autotune=_ratio(verdict, own, names.get("pytorch-autotune")),
        tuning_s=data["amptune"]["seconds"],
        oracle_s=oracle.seconds,
        autotune_s=autotune["seconds"],
        early=early,
        near_s=near_s,
        policy=own,
        autotune_failure=autotune["failure"],
    )


def approach(timeline: Sequence[Mapping[str, Any]], final: Policy) -> tuple[float | None, float | None]:
    """(time of the best trial's policy after EARLY_S seconds over the final one's, seconds until it stays NEAR that).

    The best is who was fastest in the trials so far; what it and the final one really take is told by the median of
    all the times they were measured. None where there was no trial by then, or the final policy was not measured.
    """
    blocks: dict[Policy, list[float]] = defaultdict(list)
    for entry in timeline:
        if entry.get("ms_per_sample") is not None:
            blocks[_unbatched(entry["policy"])].append(entry["ms_per_sample"])
    if final not in blocks:
        return None, None
    truth = {policy: statistics.median(times) for policy, times in blocks.items()}
    early: float | None = None
    near_s: float | None = None
    best, best_ms = final, math.inf
    for entry in timeline:
        if entry["what"] != "trial" or entry["ms_per_sample"] is None:
            continue
        if entry["ms_per_sample"] < best_ms:
            best, best_ms = _unbatched(entry["policy"]), entry["ms_per_sample"]
        over = truth[best] / truth[final]
        early = over if entry["at_s"] <= EARLY_S else early
        near_s = None if over > NEAR else entry["at_s"] if near_s is None else near_s
    return early, near_s


def _unbatched(policy: Mapping[str, Any]) -> Policy:
    return replace(policy_from_dict(policy), batch_size=None)


def _fastest(ms: Mapping[str, float | None], of: str) -> str | None:
    """The fastest of the contenders whose names begin so."""
    alive = {name: time_ms for name, time_ms in ms.items() if name.startswith(of) and time_ms is not None}
    return min(alive, key=lambda name: alive[name], default=None)


def _ratio(verdict: Verdict | None, a: Policy | None, b: Policy | None) -> Ratio | None:
    """The speed of one over another's; exactly 1 where both are the same policy."""
    return None if verdict is None or a is None or b is None else verdict.scores.between(a, b)


def _step_ms(rows: Sequence[Timing], policy: Policy) -> float | None:
    """The geometric mean over its blocks of their medians; None if it failed in any of them."""
    outcomes = [row.outcome for row in rows if row.policy == policy]
    blocks = [outcome.mean_ms for outcome in outcomes if isinstance(outcome, Measurement)]
    return statistics.geometric_mean(blocks) if blocks and len(blocks) == len(outcomes) else None


def timings_of(comparison: Mapping[str, Any]) -> list[Timing]:
    """The blocks of a comparison, as they are kept here, in their order."""
    return rows_of(
        (one["launch"], [(row.policy, row.outcome) for row in map(_from_line, one["rows"])])
        for one in comparison["rounds"]
    )


def _from_line(line: Mapping[str, Any]) -> Row:
    return Row.from_line({"seconds": 0.0, **line})


def _line(policy: Policy, outcome: Outcome) -> dict[str, Any]:
    line = Row(policy=policy, outcome=outcome, seconds=0.0).to_line()
    return {name: value for name, value in line.items() if name != "seconds"}


def table(out: Path, oracles: Path) -> str:
    """The evidence in OUT as a Markdown table, times in ms a step."""
    columns = ("stock", "amp bf16", "amp fp16", "pytorch-autotune", "its own step", "amptune", "oracle")
    heads = (
        "workload", *columns, "amptune / oracle", "of the oracle's time", "vs. AMP recipe", "vs. pytorch-autotune",
        "amptune took", "pytorch-autotune took", f"best at {EARLY_S:.0f} s / final", f"within {NEAR - 1:.0%} after",
        "policy",
    )  # fmt: skip
    summaries = []
    for path in sorted(out.glob("*.json")):
        data, oracle = json.loads(path.read_text()), read(oracles / f"{path.stem}.jsonl")
        if "comparison" in data and oracle is not None:
            summaries.append(summary_of(data, oracle))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(_cells(summary, columns))} |" for summary in summaries]
    means = _means(summaries)
    if summaries:
        lines.append(f"| {' | '.join(['**geometric mean**', *[''] * len(columns), *means, *[''] * 5])} |")
    failures = {summary.workload: summary.autotune_failure for summary in summaries if summary.autotune_failure}
    lines += [f"\n{name}: pytorch-autotune failed: {failure}" for name, failure in failures.items()]
    return "\n".join(lines)


def _cells(summary: Summary, columns: Sequence[str]) -> list[str]:
    ms = {**summary.ms, "its own step": summary.own_step_ms}
    return [
        summary.workload,
        *(f"{time_ms:.3f}" if (time_ms := ms.get(name)) is not None else "failed" for name in columns),
        _with_interval(summary.vs_oracle),
        f"{summary.share_of_time:.1%}",
        _with_interval(summary.vs_amp),
        _with_interval(summary.vs_autotune),
        f"{summary.tuning_s:.0f} s",
        f"{summary.autotune_s:.0f} s",
        f"{summary.early:.3f}" if summary.early else "-",
        f"{summary.near_s:.0f} s" if summary.near_s else "-",
        str(summary.policy),
    ]


def _means(summaries: Sequence[Summary]) -> list[str]:
    """Of what is compared: against the oracle, its time, the AMP recipe, pytorch-autotune."""
    ratios = [[getattr(one, name) for one in summaries] for name in ("vs_oracle", "vs_amp", "vs_autotune")]
    oracle, amp, autotune = ([ratio.value for ratio in of if ratio is not None] for of in ratios)
    shares = [summary.share_of_time for summary in summaries]
    cells = [f"{statistics.geometric_mean(values):.3f}" if values else "-" for values in (oracle, amp, autotune)]
    return [cells[0], f"{statistics.geometric_mean(shares):.1%}" if shares else "-", *cells[1:]]


def _with_interval(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    interval = "" if math.isinf(ratio.high) else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
    return f"{ratio.value:.3f}{interval}"


def write(path: Path, data: Mapping[str, Any]) -> None:
    """All of it or nothing: a half-written file would end the resuming."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(data, indent=1) + os.linesep)
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
