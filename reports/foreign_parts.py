"""What `foreign.py` does of one model with one budget, part by part; each adds lines to the model's file."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from autotune import AUTOTUNE_MORE_S, Bridged, answer_of, policy_of_autotune  # beside this program
from foreign_table import FASTEST, FIRST, WITH_GRID, Evidence, Line, Plan, mean_ms, name_of, ran
from plain_loop import Arm, batches, compile_caches, device_or_default, in_turn

import amptune
from amptune.errors import AmptuneError
from amptune.measure.results.outcome import Measurement, Outcome
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.events import ContenderMeasured, Event, StepStarted, TrialEnded
from amptune.search.plan.budget import Budget

GRID_BUDGET_S = 300.0
# Nothing is asked of pytorch-autotune with less.
AUTOTUNE_BUDGET_S = 120.0
TUNING_MORE_S = 20.0
# What a launch of all arms and a group of the grid are expected to take before one of this model was seen.
LAUNCH_S, LONG_LAUNCH_S, GROUP_S, LONGER = 120.0, 240.0, 180.0, 1.2
AT_ONCE = max(1, min(6, len(os.sched_getaffinity(0)) // 2))
# Policies that were found before for the models that amptune was developed with.
REPORTED = Path(__file__).resolve().parent / "h200" / "rivals"


@dataclass(frozen=True, kw_only=True)
class Work:
    """One model with one budget, and what all of them share."""

    evidence: Evidence
    target: str
    budget_s: float
    plan: Plan
    limit: Budget
    device: str | None
    launches: int
    caches: Path

    def caches_of(self, name: str) -> Path:
        return self.caches / self.evidence.model / name

    def amptune_caches(self, tuning: int) -> Path:
        return self.caches_of(f"amptune-{self.budget_s:g}-{tuning}")

    def in_turn(self, arms: Sequence[Arm], seed: str = "", *, steps: int | None = None) -> list[Line]:
        return in_turn(arms, self.target, self.device, self.limit, seed=f"{self.evidence.model} {seed}", steps=steps)


# --- what is to do -------------------------------------------------------------------------------------------------


def missing(work: Work) -> list[str]:
    """Returns the parts that may begin now: both tuners and the grid, then the launches."""
    evidence, budget_s = work.evidence, work.budget_s
    tuned = {line.get("tuning", 0) for line in evidence.of("amptune", budget_s)}
    autotunes = work.plan.autotune and budget_s >= AUTOTUNE_BUDGET_S and evidence.autotune(budget_s) is None
    found = ["pytorch-autotune"] if autotunes else []
    found += [f"amptune {tuning}" for tuning in range(work.plan.tunings) if tuning not in tuned]
    found += ["grid"] if missing_of_grid(work) else []
    launched = {line["launch"] for line in evidence.of("launch", budget_s)}
    return found or [f"launch {launch}" for launch in range(work.launches) if launch not in launched]


def expected_s(work: Work, part: str) -> float:
    """Returns the seconds that a part is expected to take; of what has groups, a group."""
    kind = part.partition(" ")[0]
    if kind in ("amptune", "pytorch-autotune"):
        return work.budget_s + (TUNING_MORE_S if kind == "amptune" else AUTOTUNE_MORE_S)
    first = GROUP_S if kind != "launch" else LONG_LAUNCH_S if work.plan.steps else LAUNCH_S
    return max((LONGER * line["launch_s"] for line in work.evidence.of(kind)), default=first)


def do(work: Work, part: str) -> bool:
    """Does a part; returns whether time was left for all of it."""
    kind, _, number = part.partition(" ")
    match kind:
        case "amptune":
            return tuned(work, int(number))
        case "pytorch-autotune":
            return autotuned(work)
        case "grid":
            return grid_measured(work)
        case _:
            return launched(work, int(number))


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
        if isinstance(event, StepStarted):
            entry |= {"stage": event.stage, "step": event.what}
        elif isinstance(event, TrialEnded):
            entry |= _measured(event.trial.policy, event.trial.outcome)
        elif isinstance(event, ContenderMeasured):
            entry |= _measured(event.policy, event.outcome)
        self.entries.append(entry)


def _measured(policy: Policy, outcome: Outcome) -> Line:
    ms = outcome.mean_ms if isinstance(outcome, Measurement) else None
    return {"policy": policy_to_dict(replace(policy, batch_size=None)), "ms": ms}


def tuned(work: Work, tuning: int) -> bool:
    """Tunes by amptune, with empty caches."""
    caches = work.amptune_caches(tuning)
    shutil.rmtree(caches, ignore_errors=True)
    course = Course()
    found: Line
    with compile_caches(caches) as folder:
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
    told = {"budget_s": work.budget_s, "tuning": tuning, "seconds": course.now_s(), "course": course.entries, **found}
    work.evidence.add("amptune", told)
    return True


def autotuned(work: Work) -> bool:
    """Tunes by pytorch-autotune, with empty caches."""
    shutil.rmtree(work.caches_of("pytorch-autotune"), ignore_errors=True)
    with compile_caches(work.caches_of("pytorch-autotune")) as folder:
        answer = folder / "answer.json"
        program = Path(__file__).with_name("foreign.py")
        command = [sys.executable, str(program), work.target, "--only-autotune", "--out", str(answer)]
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
    """Trains by every policy of the grid, once, and by its fastest with the fused optimizer.

    Some train beside one another. Returns whether time was left for all of them.
    """
    while policies := missing_of_grid(work):
        if work.limit.left_s < expected_s(work, "grid"):
            return False
        arms = [Arm(names=("grid",), policy=policy, caches=work.caches_of("plain")) for policy in policies[:AT_ONCE]]
        for row in work.in_turn(arms):
            work.evidence.add("grid", row)
    return True


def missing_of_grid(work: Work) -> list[Policy]:
    """Returns the policies to train by next, once it is known whether the model has convolutions."""
    evidence, tunings = work.evidence, work.evidence.of("amptune")
    if work.budget_s != GRID_BUDGET_S or evidence.model not in WITH_GRID or not tunings:
        return []
    convolutions = any(line.get("convolutions") for line in tunings)
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


def launched(work: Work, launch: int) -> bool:
    """Trains by all arms in turn."""
    for row in work.in_turn(arms_of(work), f"{work.budget_s:g} {launch}", steps=work.plan.steps):
        work.evidence.add("launch", {"budget_s": work.budget_s, "launch": launch, **row})
    return True


def arms_of(work: Work) -> list[Arm]:
    """Returns each way to train once, under all its names."""
    evidence, plain = work.evidence, work.caches_of("plain")
    found = [("stock", STOCK, plain), ("amp bf16", amp_recipe("bf16"), plain), ("amp fp16", amp_recipe("fp16"), plain)]
    found += [
        (name_of(line), policy_from_dict(line["policy"]), work.amptune_caches(line.get("tuning", 0)))
        for line in evidence.of("amptune", work.budget_s)
        if "policy" in line
    ]
    autotune = evidence.autotune(work.budget_s)
    config = autotune.get("config") if autotune else None
    theirs = work.caches_of("pytorch-autotune")
    if autotune and config:
        found.append(("pytorch-autotune", policy_of_autotune(config, fused=autotune["fused"]), theirs))
    if (reported := REPORTED / f"{evidence.model}.json").exists() and evidence.model in FIRST:
        found.append(("reports", policy_from_dict(json.loads(reported.read_text())["amptune"]["policy"]), plain))
    if work.budget_s == GRID_BUDGET_S:
        found += [(f"grid {i}", policy, plain) for i, policy in enumerate(fastest_of_grid(evidence), start=1)]
    policies = dict.fromkeys(policy for _, policy, _ in found)
    arms = []
    for policy in policies:
        same = [(name, caches) for name, other, caches in found if other == policy]
        arms.append(Arm(names=tuple(name for name, _ in same), policy=policy, caches=same[0][1]))
    return arms + ([Arm(names=("its own step",), config=config, caches=theirs)] if config else [])
