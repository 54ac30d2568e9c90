"""amptune and pytorch-autotune on models outside the zoo: how fast is a plain training loop behind each, by budget?

    pip install pytorch-autotune==2.0.0 torchvision timm transformers
    python reports/foreign.py --out reports/h200/foreign --limit 570
    python reports/foreign.py --out reports/h200/foreign --table

Goes through the plan in `foreign_table.py`. For each budget and model, with empty caches of torch.compile for each
tuning: `amptune.tune`; pytorch-autotune, once a model, since a result serves every budget that its search ended within;
with 300 s an exhaustive grid of dtype × layout × torch.compile, and the fused optimizer with its fastest three. Then
the README's loop (`plain_loop.py`) trains by stock PyTorch, the AMP recipes, amptune's policy, pytorch-autotune's own
step, the policy nearest to its choice, and the grid's fastest: in turn, in several launches of fresh processes.

Appends a line to OUT/MODEL.jsonl as each is done, and does nothing that stands there again. A command starts nothing
that is not expected to end within `--limit`; the next command goes on. A MODEL is a name, or a target like
train.py:workload. `--course` then also trains under each policy that was the best so far while a tuner ran.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from autotune import AUTOTUNE_MORE_S, Bridged, answer_of, policy_of_autotune  # beside this program
from foreign_table import FASTEST, MODELS, PLAN, WITH_GRID, Evidence, Line, mean_ms, ran, table
from oracle import compile_caches
from plain_loop import Arm, LimitReachedError, batches, device_or_default, in_turn

import amptune
from amptune.errors import AmptuneError
from amptune.measure.results.outcome import Measurement, Outcome
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.events import ContenderMeasured, Event, TrialEnded
from amptune.search.plan.budget import Budget
from amptune.workload.zoo import NAMES

GRID_BUDGET_S, UNASKED_BUDGET_S = 300.0, 120.0
# Nothing is asked of pytorch-autotune with less.
AUTOTUNE_BUDGET_S = 120.0
TUNING_MORE_S = 25.0
# What a launch of all arms and a group of the grid are expected to take before one of this model was seen.
LAUNCH_S, GROUP_S, LONGER = 90.0, 180.0, 1.2
AT_ONCE = max(1, min(6, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, kw_only=True)
class Work:
    """One model with one budget, and what all of them share."""

    evidence: Evidence
    target: str
    budget_s: float
    limit: Budget
    device: str | None
    launches: int
    caches: Path
    autotune: bool
    course: bool

    def caches_of(self, name: str) -> Path:
        return self.caches / self.evidence.model / name

    @property
    def amptune_caches(self) -> Path:
        return self.caches_of(f"amptune-{self.budget_s:g}")

    def in_turn(self, arms: Sequence[Arm], seed: str = "") -> list[Line]:
        return in_turn(arms, self.target, self.device, self.limit, seed=f"{self.evidence.model} {seed}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of the plan, or a target; default: all of the plan")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, help="only this budget of the plan; of a target (default 120)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="for the whole command")
    parser.add_argument("--launches", type=int, default=3, help="of each comparison (default 3)")
    parser.add_argument("--device", default=None)
    parser.add_argument("--caches", type=Path, help="where torch.compile keeps what it made, for the launches")
    parser.add_argument("--no-autotune", action="store_true", help="leave pytorch-autotune out")
    parser.add_argument("--course", action="store_true", help="also train under what was best on the way")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    parser.add_argument("--only-autotune", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_autotune:
        search_by_autotune(target_of(arguments.models[0]), arguments.budget, arguments.device, arguments.out)
        return 0
    if not arguments.table:
        if not arguments.no_autotune and importlib.util.find_spec("pytorch_autotune") is None:
            sys.exit("pytorch-autotune is not there: pip install pytorch-autotune==2.0.0, or --no-autotune")
        arguments.out.mkdir(parents=True, exist_ok=True)
        measure_all(arguments)
    print(table([Evidence(path) for path in sorted(arguments.out.glob("*.jsonl"))]))
    return 0


def measure_all(arguments: argparse.Namespace) -> None:
    limit = Budget(seconds=arguments.limit)
    for budget_s, model in planned(arguments.models, arguments.budget):
        work = Work(
            evidence=Evidence(arguments.out / f"{model.rpartition(':')[2]}.jsonl"),
            target=target_of(model),
            budget_s=budget_s,
            limit=limit,
            device=arguments.device,
            launches=arguments.launches,
            caches=arguments.caches or Path(tempfile.gettempdir()) / "amptune-foreign",
            autotune=not arguments.no_autotune and budget_s >= AUTOTUNE_BUDGET_S,
            course=arguments.course,
        )
        try:
            done = measure(work)
        except LimitReachedError:
            done = False
        if not done:
            print(f"{model}, {budget_s:g} s: the rest is left for another command", file=sys.stderr, flush=True)


def planned(models: Sequence[str], budget_s: float | None) -> list[tuple[float, str]]:
    """Returns (budget, model) in the plan's order, then targets that are not in the plan."""
    plan = [(seconds, model) for seconds, names in PLAN for model in names]
    own = [model for model in models if model not in (*MODELS, *NAMES)]
    chosen = [
        (seconds, model)
        for seconds, model in plan
        if (not models or model in models) and budget_s in (None, seconds)
    ]  # fmt: skip
    return chosen + [(budget_s or UNASKED_BUDGET_S, model) for model in own]


def target_of(model: str) -> str:
    if model in MODELS:
        return f"{Path(__file__).resolve().with_name('foreign_models.py')}:{model}"
    return f"amptune.workload.zoo:{model}" if model in NAMES else model


def measure(work: Work) -> bool:
    """Does what is missing of one model with one budget; returns whether time was left for all of it."""
    parts = (tuned, autotuned, grid_measured, launched, course_measured)
    return all(part(work) for part in parts)


# --- the two tuners ------------------------------------------------------------------------------------------------


class Course:
    """An observer that notes each measurement, in seconds since it was made, and the names of other events."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.entries: list[Line] = []

    def now_s(self) -> float:
        return round(time.monotonic() - self._started_s, 2)

    def __call__(self, event: Event) -> None:
        entry: Line = {"at_s": self.now_s(), "what": type(event).__name__}
        if isinstance(event, TrialEnded):
            entry |= _measured(event.trial.policy, event.trial.outcome)
        elif isinstance(event, ContenderMeasured):
            entry |= _measured(event.policy, event.outcome)
        self.entries.append(entry)


def _measured(policy: Policy, outcome: Outcome) -> Line:
    ms = outcome.mean_ms if isinstance(outcome, Measurement) else None
    return {"policy": policy_to_dict(replace(policy, batch_size=None)), "ms": ms}


def tuned(work: Work) -> bool:
    """Tunes by amptune, with empty caches."""
    if work.evidence.of("amptune", work.budget_s):
        return True
    if work.limit.left_s < work.budget_s + TUNING_MORE_S:
        return False
    shutil.rmtree(work.amptune_caches, ignore_errors=True)
    course = Course()
    found: Line
    with compile_caches(work.amptune_caches) as folder:
        try:
            decision = amptune.tune(
                work.target,
                budget_s=work.budget_s,
                compile=True,
                device=work.device,
                study=folder / "study",
                observer=course,
            )
            found = {
                "policy": policy_to_dict(replace(decision.winner, batch_size=None)),
                "speedup": [decision.speedup.value, decision.speedup.low, decision.speedup.high],
                "provisional": decision.provisional,
                "findings": [str(finding) for finding in decision.findings],
                "hardware": decision.hardware.name,
                "torch": decision.hardware.software.torch,
                "convolutions": 2 in decision.subject.convolution_dims,
            }
        except AmptuneError as error:  # an answer too: with this budget amptune has none
            found = {"failure": str(error)}
    told = {"budget_s": work.budget_s, "seconds": course.now_s(), "course": course.entries, **found}
    work.evidence.add("amptune", told)
    return True


def autotuned(work: Work) -> bool:
    """Tunes by pytorch-autotune, with empty caches, unless a result serves already."""
    if not work.autotune or work.evidence.autotune(work.budget_s) is not None:
        return True
    if work.limit.left_s < work.budget_s + AUTOTUNE_MORE_S:
        return False
    shutil.rmtree(work.caches_of("pytorch-autotune"), ignore_errors=True)
    with compile_caches(work.caches_of("pytorch-autotune")) as folder:
        answer = folder / "answer.json"
        command = [sys.executable, __file__, work.target, "--only-autotune", "--out", str(answer)]
        command += ["--budget", str(work.budget_s)] + (["--device", work.device] if work.device else [])
        found = answer_of(command, answer, folder / "log", work.budget_s, work.limit.left_s)
    if found is None:
        return False
    work.evidence.add("pytorch-autotune", found)
    return True


class Stamps(io.StringIO):
    """Standard output that notes when pytorch-autotune prints a trial, in seconds since it was made."""

    def __init__(self) -> None:
        super().__init__()
        self._started_s = time.monotonic()
        self.at_s: list[float] = []

    def write(self, text: str) -> int:
        if text.startswith("  ["):
            self.at_s.append(round(time.monotonic() - self._started_s, 2))
        return (sys.__stdout__ or self).write(text)


def search_by_autotune(target: str, budget_s: float, device: str | None, answer: Path) -> None:
    """Tunes by pytorch-autotune in this process and writes its answer; each trial has the time of its end."""
    import torch

    from amptune.workload.targets import load_workload, parse_target

    stamps = Stamps()
    torch.manual_seed(0)
    device = device_or_default(device)
    workload = load_workload(parse_target(target))
    bridged = Bridged(workload, next(batches(workload, device)))
    started_s = time.monotonic()
    with redirect_stdout(stamps):
        result = bridged.search(budget_s, device)
    report = result.report.to_dict()
    printed = [trial for trial in report["trials"] if trial["status"] != "skipped"]
    for trial, at_s in zip(printed, stamps.at_s, strict=False):
        trial["at_s"] = at_s
    found = {
        "search_s": round(time.monotonic() - started_s, 1),
        "config": result.config.to_dict(),
        "fused": bool(result.optimizer.defaults.get("fused")),
        "fuses": bridged.fuses,
        "report": report,
    }
    answer.write_text(json.dumps(found))


# --- what is trained in turn ---------------------------------------------------------------------------------------


def grid_measured(work: Work) -> bool:
    """Trains by every policy of the grid, once, and by its fastest with the fused optimizer."""
    if work.budget_s != GRID_BUDGET_S or work.evidence.model not in WITH_GRID:
        return True
    convolutions = any(line.get("convolutions") for line in work.evidence.of("amptune"))
    while missing := missing_of_grid(work.evidence, convolutions=convolutions):
        if not in_groups(work, "grid", missing):
            return False
    return True


def in_groups(work: Work, what: str, policies: Sequence[Policy]) -> bool:
    """Trains by each policy once, some of them beside one another; returns whether time was left for all of them."""
    for first in range(0, len(policies), AT_ONCE):
        if work.limit.left_s < expected_s(work.evidence.of(what), GROUP_S):
            return False
        group = policies[first : first + AT_ONCE]
        arms = [Arm(names=(what,), policy=policy, caches=work.caches_of("plain")) for policy in group]
        for row in work.in_turn(arms):
            work.evidence.add(what, row)
    return True


def missing_of_grid(evidence: Evidence, *, convolutions: bool) -> list[Policy]:
    done = {policy_from_dict(line["policy"]) for line in evidence.of("grid")}
    fused = [replace(policy, fused_optimizer=True) for policy in fastest_of_grid(evidence, fused=False)]
    return [p for p in grid(convolutions=convolutions) if p not in done] or [p for p in fused if p not in done]


def grid(*, convolutions: bool) -> list[Policy]:
    return [
        Policy(
            autocast=autocast,  # type: ignore[arg-type]  # itertools.product forgets the literals
            fp32_math="tf32" if autocast == "off" else "stock",
            memory_format=layout,  # type: ignore[arg-type]
            compile=mode,  # type: ignore[arg-type]
        )
        for mode, autocast, layout in itertools.product(
            ("off", "default", "reduce-overhead"),
            ("off", "bf16", "fp16"),
            ("contiguous", "channels_last") if convolutions else ("contiguous",),
        )
    ]


def fastest_of_grid(evidence: Evidence, *, fused: bool = True) -> list[Policy]:
    """Returns the fastest policies of the grid, with or without those that have the fused optimizer."""
    ms = {policy_from_dict(line["policy"]): mean_ms(line) for line in evidence.of("grid") if ran(line)}
    chosen = [policy for policy in ms if fused or not policy.fused_optimizer]
    return sorted(chosen, key=lambda policy: ms[policy])[:FASTEST]


def launched(work: Work) -> bool:
    """Trains by all arms in turn, launch after launch."""
    for launch in range(len({line["launch"] for line in work.evidence.of("launch", work.budget_s)}), work.launches):
        if work.limit.left_s < expected_s(work.evidence.of("launch"), LAUNCH_S):
            return False
        for row in work.in_turn(arms_of(work), f"{work.budget_s:g} {launch}"):
            work.evidence.add("launch", {"budget_s": work.budget_s, "launch": launch, **row})
    return True


def expected_s(lines: Sequence[Line], before_s: float) -> float:
    return max((LONGER * line["launch_s"] for line in lines), default=before_s)


def arms_of(work: Work) -> list[Arm]:
    """Returns each way to train once, under all its names."""
    evidence, plain = work.evidence, work.caches_of("plain")
    found = [("stock", STOCK, plain), ("amp bf16", amp_recipe("bf16"), plain), ("amp fp16", amp_recipe("fp16"), plain)]
    found += [
        ("amptune", policy_from_dict(line["policy"]), work.amptune_caches)
        for line in evidence.of("amptune", work.budget_s)
        if "policy" in line
    ]
    autotune = evidence.autotune(work.budget_s)
    config = autotune.get("config") if autotune else None
    theirs = work.caches_of("pytorch-autotune")
    if autotune and config:
        found.append(("pytorch-autotune", policy_of_autotune(config, fused=autotune["fused"]), theirs))
    if work.budget_s == GRID_BUDGET_S:
        found += [(f"grid {i}", policy, plain) for i, policy in enumerate(fastest_of_grid(evidence), start=1)]
    policies = dict.fromkeys(policy for _, policy, _ in found)
    arms = []
    for policy in policies:
        same = [(name, caches) for name, other, caches in found if other == policy]
        arms.append(Arm(names=tuple(name for name, _ in same), policy=policy, caches=same[0][1]))
    return arms + ([Arm(names=("its own step",), config=config, caches=theirs)] if config else [])


def course_measured(work: Work) -> bool:
    """Trains by each policy that was a tuner's best so far, if asked for."""
    done = {policy_from_dict(line["policy"]) for line in work.evidence.of("course")}
    best = dict.fromkeys(policy for _, _, policy in best_so_far(work.evidence, work.budget_s))
    missing = [policy for policy in best if policy not in done] if work.course else []
    return in_groups(work, "course", missing)


def best_so_far(evidence: Evidence, budget_s: float) -> Iterator[tuple[str, float, Policy]]:
    """Yields (tuner, seconds, policy) whenever a tuner measured one faster than all before."""
    best_ms = math.inf
    for line in evidence.of("amptune", budget_s):
        for entry in line["course"]:
            if (entry.get("ms") or math.inf) < best_ms:
                best_ms = entry["ms"]
                yield "amptune", entry["at_s"], policy_from_dict(entry["policy"])
    autotune, best_ms = evidence.autotune(budget_s) or {}, math.inf
    for trial in autotune.get("report", {}).get("trials", ()):
        if (trial["ms_per_step"] or math.inf) < best_ms:
            best_ms, fused = trial["ms_per_step"], trial["config"]["fused_opt"] and autotune["fuses"]
            yield "pytorch-autotune", trial.get("at_s", math.nan), policy_of_autotune(trial["config"], fused=fused)


if __name__ == "__main__":
    sys.exit(main())
