"""The oracle: how fast a bundled workload can be made on this machine, by trying everything.

    python reports/oracle.py resnet50 vgg16 --out reports/h200/oracle --limit 580
    python reports/oracle.py --out reports/h200/oracle --table

For each workload every eager policy: autocast × FP32 math (where autocast is off) × memory format and cudnn.benchmark
(where there are convolutions) × fused optimizer; and CUDA graphs, by themselves and by every mode of torch.compile, on
the fastest of each dtype and memory format, of the four fastest kinds without cudnn.benchmark. One that is far behind
the best is timed over two steps only. What tells most is measured first: eager policies without cudnn.benchmark, CUDA
graphs, then the modes of torch.compile that do not tune kernels, compiled in processes beside one another, then
cudnn.benchmark, then max-autotune.

Appends a line to OUT/WORKLOAD.jsonl as each policy is measured: its outcome with every step's time, and the seconds
it cost, compiling included. What stands there already is not measured again, so that a command that was cut short,
by `--limit` or otherwise, goes on where it ended; with `--retry` what failed is measured again. The caches of
torch.compile are empty at the start of each command, unless `--caches` names a folder to keep them in.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from comparison import compile_beside  # beside this program

from amptune.errors import AmptuneError
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome, outcome_from_dict, outcome_to_dict
from amptune.measure.results.subject import Prepared
from amptune.measure.workers.source import Source
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import AUTOTUNED_MODES, STOCK, WHOLE_MODES, Policy
from amptune.search.plan.budget import Budget
from amptune.workload.zoo import NAMES

SCHEMA = "amptune.oracle/1"
EFFORT = Effort(warmup_s=1.0, measure_s=0.3, min_steps=4)
# One slower than the best by this factor is timed over two steps only.
HOPELESS = 2.5
# The hard end of one trial. max-autotune took up to 212 s where others published it (pytorch-autotune 2.0, an A100).
EAGER_LIMIT_S, COMPILED_LIMIT_S = 120.0, 300.0
COMPILED_POINTS = 4
# So many are compiled at the same time, each in a process of its own; not those that time kernels while they compile.
COMPILED_AT_ONCE = 8
PREPARE_LIMIT_S = 300.0
# With less than this left no workload is begun: it has to be built first.
SHORTEST_WORKLOAD_S = 45.0
# What a trial is reckoned to take before one like it was seen, and how much longer than the longest such after that.
EXPECTED_S = {"off": 10.0, "default": 12.0, "reduce-overhead": 12.0}
EXPECTED_AUTOTUNE_S, EXPECTED_BENCHMARK_S = 120.0, 20.0
LONGER = 1.2


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy, measured; `seconds` is all the wall-clock time it cost, its worker's start included if it needed one.

    A compiled one stands behind all eager ones.
    """

    policy: Policy
    outcome: Outcome
    seconds: float

    @property
    def ms(self) -> float:
        """Infinite where it failed."""
        return self.outcome.mean_ms if isinstance(self.outcome, Measurement) else float("inf")

    def to_line(self) -> dict[str, Any]:
        data = outcome_to_dict(self.outcome)
        if "step_ms" in data:
            data["step_ms"] = [round(ms, 4) for ms in data["step_ms"]]
            data["losses"] = [round(loss, 6) for loss in data["losses"]]
        return {"policy": policy_to_dict(self.policy), "seconds": round(self.seconds, 3), "outcome": data}

    @staticmethod
    def from_line(data: Mapping[str, Any]) -> Row:
        return Row(
            policy=policy_from_dict(data["policy"]),
            outcome=outcome_from_dict(data["outcome"]),
            seconds=data["seconds"],
        )


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What was measured of a workload, in order; `machine` is the first line of its file."""

    machine: Mapping[str, Any]
    rows: tuple[Row, ...] = ()

    @property
    def seconds(self) -> float:
        """What trying everything has cost."""
        return sum(row.seconds for row in self.rows)

    def fastest(self, count: int | None = None, *, eager: bool = False) -> list[Row]:
        """The fastest rows that ran; of the eager ones alone, if so wished."""
        alive = [row for row in self.rows if isinstance(row.outcome, Measurement)]
        alive = [row for row in alive if _is_eager(row.policy) or not eager]
        return sorted(alive, key=lambda row: row.ms)[:count]

    def row_of(self, policy: Policy) -> Row | None:
        return next((row for row in self.rows if row.policy == policy), None)

    def _to_compile(self) -> list[Policy]:
        """The fastest eager policies of so many kinds: with fused and cudnn.benchmark on and off, four would be one."""
        best: dict[tuple[str, str], Policy] = {}
        for row in self.fastest(eager=True):
            if not row.policy.cudnn_benchmark:
                best.setdefault((row.policy.autocast, row.policy.memory_format), row.policy)
        return list(best.values())[:COMPILED_POINTS]

    def missing(self) -> list[Policy]:
        """What is still to be measured, in that order; compiled ones are known when the plain eager ones are done."""
        measured = {row.policy for row in self.rows}
        eager = [p for p in eager_policies(convolutions=self.machine["convolutions"]) if p not in measured]
        plain = [policy for policy in eager if not policy.cudnn_benchmark]
        if plain:
            return eager
        points = self._to_compile()
        recorded = [replace(point, cuda_graphs=True) for point in points]
        compiled = [replace(point, compile=mode) for mode in WHOLE_MODES for point in points]
        left = [policy for policy in (*recorded, *compiled) if policy not in measured]
        soon = [policy for policy in left if policy.compile not in AUTOTUNED_MODES]
        return [*soon, *eager, *(policy for policy in left if policy not in soon)]


def _is_eager(policy: Policy) -> bool:
    return policy.compile == "off" and not policy.cuda_graphs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="for the whole command")
    parser.add_argument("--device", default=None)
    parser.add_argument("--caches", type=Path, metavar="DIR", help="keep what torch.compile makes there")
    parser.add_argument("--retry", action="store_true", help="measure again what failed before")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    arguments = parser.parse_args()
    budget = Budget(seconds=arguments.limit)
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in () if arguments.table else arguments.workloads or NAMES:
        try:
            with compile_caches(arguments.caches) as folder:
                extend(name, arguments.out, budget, arguments.device, folder / "workers.log", retry=arguments.retry)
        except AmptuneError as error:  # the others are measured all the same
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
    found = map(read, sorted(arguments.out.glob("*.jsonl")))
    print(table([oracle for oracle in found if oracle is not None]))
    return int(failed)


def extend(name: str, out: Path, budget: Budget, device: str | None, log: Path, *, retry: bool = False) -> None:
    """Measures what is missing of one workload, as long as the budget lasts."""
    path = out / f"{name}.jsonl"
    oracle = read(path)
    if oracle is not None and retry:
        oracle = replace(oracle, rows=tuple(oracle.fastest()))
    if (oracle is not None and not oracle.missing()) or budget.left_s < SHORTEST_WORKLOAD_S:
        return
    with WorkerEvaluator(Source(target=f"amptune.workload.zoo:{name}"), device, log) as evaluator:
        started_s = budget.spent_s
        prepared = evaluator.prepare(min(PREPARE_LIMIT_S, budget.left_s))
        machine = machine_of(name, prepared, budget.spent_s - started_s)
        if oracle is None:
            oracle = Oracle(machine=machine)
            append(path, dict(machine))
        require_the_same(oracle.machine, machine, path)
        measure_missing(oracle, evaluator, path, budget)


def measure_missing(oracle: Oracle, evaluator: WorkerEvaluator, path: Path, budget: Budget) -> Oracle:
    """One policy after another, each written down before the next."""
    while policies := next_policies(oracle, budget.left_s):
        before_s = budget.spent_s
        if len(policies) > 1:
            compile_beside(evaluator, policies, budget.left_s)
        launch_s = (budget.spent_s - before_s) / len(policies)
        for policy in policies:
            row = measured(policy, oracle, evaluator, budget, launch_s)
            if row is None:
                return oracle
            append(path, row.to_line())
            oracle = replace(oracle, rows=(*oracle.rows, row))
            result = f"{row.ms:.3f} ms" if isinstance(row.outcome, Measurement) else str(row.outcome)
            print(
                f"{oracle.machine['workload']}: {policy}: {result} ({row.seconds:.1f} s)", file=sys.stderr, flush=True
            )
    return oracle


def measured(policy: Policy, oracle: Oracle, evaluator: WorkerEvaluator, budget: Budget, launch_s: float) -> Row | None:
    """None where the command's limit and not the policy cut it short: that says nothing about the policy."""
    longest_s = EAGER_LIMIT_S if policy.compile == "off" else COMPILED_LIMIT_S
    limit_s = min(longest_s, max(1.0, budget.left_s))
    fastest = oracle.fastest(1)
    effort = replace(EFFORT, time_limit_s=limit_s, abandon_above_ms=HOPELESS * fastest[0].ms if fastest else None)
    before_s = budget.spent_s
    outcome = evaluator.measure(policy, effort)
    if isinstance(outcome, Failure) and outcome.kind == "timeout" and limit_s < longest_s:
        return None
    return Row(policy=policy, outcome=outcome, seconds=launch_s + budget.spent_s - before_s)


def eager_policies(*, convolutions: bool) -> list[Policy]:
    """The grid, what is likely fast before the rest: a slow one is then soon known for it."""
    either = (False, True)
    return [
        Policy(
            autocast=autocast,  # type: ignore[arg-type]  # itertools.product forgets the literals
            fp32_math=math,
            memory_format=layout,  # type: ignore[arg-type]
            cudnn_benchmark=benchmark,
            fused_optimizer=fused,
        )
        for benchmark, autocast, layout, fused in itertools.product(
            either if convolutions else (False,),
            ("bf16", "fp16", "off"),
            ("channels_last", "contiguous") if convolutions else ("contiguous",),
            either,
        )
        for math in (("stock", "tf32", "ieee") if autocast == "off" else ("stock",))
    ]


def next_policies(oracle: Oracle, left_s: float) -> list[Policy]:
    """What is missing and can be expected to fit into the time left: one policy, or several to compile at once."""
    fitting = [policy for policy in oracle.missing() if expected_s(policy, oracle.rows) <= left_s]
    together = list(takewhile(lambda policy: policy.compile not in ("off", *AUTOTUNED_MODES), fitting))
    until_now_s = accumulate(expected_s(policy, oracle.rows) for policy in together)
    held = sum(1 for seconds in until_now_s if seconds <= left_s)
    return together[: min(held, COMPILED_AT_ONCE)] or fitting[:1]


def expected_s(policy: Policy, rows: Sequence[Row]) -> float:
    """What a trial will take: by the longest like it, or before there is one by what others took elsewhere."""
    kind = (policy.compile, policy.cudnn_benchmark)
    alike = [row.seconds for row in rows if (row.policy.compile, row.policy.cudnn_benchmark) == kind]
    if alike:
        longest_s = EAGER_LIMIT_S if policy.compile == "off" else COMPILED_LIMIT_S
        return min(LONGER * max(alike), longest_s)
    benchmark_s = EXPECTED_BENCHMARK_S if policy.cudnn_benchmark else 0.0
    return EXPECTED_S.get(policy.compile, EXPECTED_AUTOTUNE_S) + benchmark_s


def machine_of(name: str, prepared: Prepared, prepare_s: float) -> dict[str, Any]:
    """The first line of a workload's file: what was measured, and on what."""
    hardware = prepared.hardware
    return {
        "schema": SCHEMA,
        "workload": name,
        "hardware": hardware.name,
        "software": {"torch": hardware.software.torch, "cudnn": hardware.software.cudnn},
        "model": prepared.subject.model_digest,
        "batch_size": prepared.subject.batch_size,
        "convolutions": 2 in prepared.subject.convolution_dims,
        "prepare_s": round(prepare_s, 2),
    }


def require_the_same(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Raises `AmptuneError` where rows of two machines, versions or models would come into one file."""
    names = ("hardware", "software", "model", "batch_size")
    differing = [f"{name} was {before[name]} and is {now[name]}" for name in names if before[name] != now[name]]
    if differing:
        raise AmptuneError(f"{path} was measured on something else: {'; '.join(differing)}; choose another --out")


@contextmanager
def compile_caches(kept: Path | None = None) -> Iterator[Path]:
    """Where torch.compile and Triton keep what they made, and a log: in a fresh folder unless one is `kept`.

    Worker processes inherit it.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ[name] for name in names if name in os.environ}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as fresh:
        folder = Path(fresh) if kept is None else kept.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            os.environ.update({name: str(folder / name.lower()) for name in names})
            yield folder
        finally:
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before)


def read(path: Path) -> Oracle | None:
    """The file as far as it goes: of a line that was cut short nothing is left, of a policy's rows the last."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    if not whole:
        return None
    head, *lines = map(json.loads, whole)
    rows = {row.policy: row for row in map(Row.from_line, lines)}
    return Oracle(machine=head, rows=tuple(rows.values()))


def append(path: Path, data: Mapping[str, Any]) -> None:
    """Behind the last whole line. Programs that add to one file wait for one another."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(data).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def table(oracles: Sequence[Oracle]) -> str:
    """The oracles as a Markdown table, times in ms a step."""
    heads = ("workload", "policies", "failed", "missing", "stock", "best eager", "best", "seconds", "its policy")
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *map(_line, oracles)])


def _line(oracle: Oracle) -> str:
    failures = sum(isinstance(row.outcome, Failure) for row in oracle.rows)
    stock, fastest, eager = oracle.row_of(STOCK), oracle.fastest(1), oracle.fastest(1, eager=True)
    cells = [
        oracle.machine["workload"],
        str(len(oracle.rows)),
        str(failures),
        _missing(oracle),
        f"{stock.ms:.3f}" if stock else "-",
        f"{eager[0].ms:.3f}" if eager else "-",
        f"{fastest[0].ms:.3f}" if fastest else "-",
        f"{oracle.seconds:.0f}",
        str(fastest[0].policy) if fastest else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _missing(oracle: Oracle) -> str:
    missing = oracle.missing()
    none_compiled = missing and all(policy.compile == "off" for policy in missing)
    return f"{len(missing)} and all compiled" if none_compiled else str(len(missing))


if __name__ == "__main__":
    sys.exit(main())
