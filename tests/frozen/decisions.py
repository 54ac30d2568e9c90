"""Decisions of simulated tunings: what each chose, and how far that is from the best; of ten, all that was tried."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from optuna.storages import InMemoryStorage
from simulated.clock import SimulatedClock
from simulated.landscape import SPACE, WORKLOADS, Landscape, SyntheticEvaluator, Trouble, batch_sizes, landscape_of

from amptune.measure.results.outcome import Measurement, Outcome
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.pipeline import tune_with
from amptune.search.plan.budget import Budget
from amptune.search.request import TuningRequest
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.space.global_batch import GlobalBatch
from amptune.search.space.knobs import points
from amptune.search.table.objective import objective_of

__all__ = ["CASES", "QUICK", "Case", "cases", "decided", "decisions", "evaluator_of", "rows_of", "traces", "versions"]

BUDGETS_S = (40.0, 80.0, 150.0, 300.0, 600.0)
# Other numbers of threads, or other kernels, sum in another order; a tie is then broken in another way.
SAME_SUMS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Haswell"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a tuning is asked for besides workload, budget and objective, and what stands in its way."""

    trouble: Trouble = field(default_factory=Trouble)
    space: Path | None = SPACE
    batch_size: int | Literal["auto"] | None = "auto"
    whole: int | None = None
    baseline: Policy = STOCK
    trials: int | None = None
    compile: bool | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    flat: float | None = None


VARIANTS: Mapping[str, Variant] = {
    "plain": Variant(),
    "own space": Variant(space=None, batch_size=None),
    "troubled": Variant(trouble=Trouble(oom=0.2, throttlings=2.0)),
    "fp16 breaks": Variant(space=None, batch_size=None, trouble=Trouble(fp16_breaks=True)),
    "many cores": Variant(space=None, trouble=Trouble(graphs_at_once=4)),
    "kept batch": Variant(batch_size=None, whole=4, baseline=amp_recipe("bf16"), trials=15, compile=False),
    "nothing faster": Variant(flat=0.05, pins={"fused_optimizer": "false"}),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulated tuning."""

    workload: str
    seed: int
    budget_s: float
    objective: str
    variant: str

    @property
    def title(self) -> str:
        return f"{self.workload}, seed {self.seed}, {self.budget_s:g} s, {self.objective}, {self.variant}"


def cases(first_seed: int = 0) -> Iterator[Case]:
    """Two tunings of each workload, budget and objective. A workload meets another variant at each of them."""
    names = list(VARIANTS)
    product = itertools.product((0, 1), ("throughput", "memory", "energy"), BUDGETS_S, WORKLOADS)
    for number, (_, objective, budget_s, workload) in enumerate(product):
        variant = names[(number + number // len(WORKLOADS)) % len(names)]
        seed = first_seed + number
        yield Case(workload=workload, seed=seed, budget_s=budget_s, objective=objective, variant=variant)


CASES = tuple(cases())
# Told whole, by seed: nothing is found in a short budget; policies and graphs that run out of memory; a global batch
# without a compiler; nothing is faster; fp16 breaks and is cured; the machine's own space for long; throttling and
# memory; a graph that comes too late; fp16 breaks in a short budget; graphs that compile beside one another.
TRACED = (0, 2, 23, 24, 58, 136, 161, 178, 181, 200)
# What `make test` decides again.
QUICK = tuple(sorted(random.Random(71).sample([case.seed for case in CASES if case.budget_s <= 80], 4)))


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What became of a tuning; the regret is the score of the truly best policy over that of the one chosen, less 1."""

    policy: str
    regret: float
    seconds: float
    trials: int
    trace: str


def evaluator_of(case: Case, clock: SimulatedClock) -> SyntheticEvaluator:
    variant = VARIANTS[case.variant]
    return SyntheticEvaluator(landscape_of(case.workload, variant.flat), clock, variant.trouble, case.seed)


def decided(case: Case) -> Decided:
    """Tunes once in simulated time."""
    clock = SimulatedClock()
    evaluator = evaluator_of(case, clock)
    with tempfile.TemporaryDirectory() as folder:
        decision = tune_with(evaluator, _request(case, clock, Path(folder)), lambda _: None)
    return Decided(
        policy=_told(decision.policy),
        regret=_regret(case, evaluator, decision),
        seconds=clock(),
        trials=len(decision.trials),
        trace=f"{_told_of(decision)}{_asked(evaluator)}",
    )


def _request(case: Case, clock: SimulatedClock, folder: Path) -> TuningRequest:
    trials = VARIANTS[case.variant].trials
    return TuningRequest(
        source=Source(target="synthetic"),
        wanted=_wanted(case.workload, case.variant),
        budget=Budget(seconds=case.budget_s, trials=trials, started=clock(), clock=clock),
        folder=folder,
        study=InMemoryStorage(),  # type: ignore[arg-type]  # Optuna takes one; a journal's 8 ms a trial are saved
        seed=case.seed,
        objective=objective_of(case.objective),
    )


def _wanted(workload: str, variant: str) -> Wanted:
    of = VARIANTS[variant]
    whole = None if of.whole is None else GlobalBatch(samples=of.whole * landscape_of(workload).own_batch_size)
    return Wanted(
        baseline=of.baseline, space=of.space, pins=of.pins, batch_size=of.batch_size, global_batch=whole,
        compile=of.compile,
    )  # fmt: skip


def _regret(case: Case, evaluator: SyntheticEvaluator, decision: Decision) -> float:
    """The best is of the space, with the landscape's batch sizes, and of what was tried; infinite if too slow."""
    objective, landscape = objective_of(case.objective), evaluator.landscape
    tried = (decision.policy, decision.baseline.policy, *(trial.policy for trial in decision.trials))
    known = {**_truths(case.workload, case.variant), **{policy: _truth(landscape, policy) for policy in tried}}
    needed = known[decision.baseline.policy][0]
    scores = {
        policy: objective.score_of(*truth) or 0.0
        for policy, truth in known.items()
        if objective.allows_speed(truth[0] / needed) and evaluator.runs(policy) and evaluator.is_sound(policy)
    }
    return max(scores.values()) / scores[decision.policy] - 1 if decision.policy in scores else float("inf")


def _truth(landscape: Landscape, policy: Policy) -> tuple[float, float, float]:
    """(samples per second, peak in MiB, joules per sample)."""
    samples_per_s = landscape.samples_per_s(policy)
    return samples_per_s, landscape.peak_mib(policy), landscape.watts(policy) / samples_per_s


@cache
def _truths(workload: str, variant: str) -> dict[Policy, tuple[float, float, float]]:
    landscape = landscape_of(workload, VARIANTS[variant].flat)
    wanted = _wanted(workload, variant)
    candidates = candidates_for(landscape.prepared, wanted, sizes=batch_sizes(landscape.own_batch_size))
    policies = map(candidates.policy_of, points(candidates.space))
    return {policy: _truth(landscape, policy) for policy in policies}


def _told_of(decision: Decision) -> str:
    codes = " ".join(finding.code for finding in decision.findings)
    tried = "".join(f"  {_told(trial.policy)}{_failed(trial.outcome)}\n" for trial in decision.trials)
    return (
        f"policy: {_told(decision.policy)}\n"
        f"claim: {_interval(decision.speedup)}, gain {_interval(decision.gain)}, "
        f"{'provisional' if decision.provisional else 'final'}\n"
        f"findings: {codes}\n"
        f"tried: {len(decision.trials)}\n{tried}"
    )


def _interval(ratio: Any) -> str:
    return f"{ratio.value:.4g} [{ratio.low:.4g}, {ratio.high:.4g}]"


def _failed(outcome: Outcome) -> str:
    return "" if isinstance(outcome, Measurement) else f"  ({outcome.kind})"


def _asked(evaluator: SyntheticEvaluator) -> str:
    """How often the machine was asked what, and a digest of all questions in their order."""
    kinds = [kind for kind, _ in evaluator.asked]
    counts = ", ".join(f"{kind} {kinds.count(kind)}" for kind in sorted(set(kinds)))
    lines = (f"{kind} {' | '.join(map(_told, policies))}" for kind, policies in evaluator.asked)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return f"asked: {counts}; in {evaluator.clock():.4g} s; {digest}\n"


def _told(policy: Policy) -> str:
    """The settings that depart from stock PyTorch, in a form that no change of amptune's own words touches."""
    departures = []
    for one in fields(policy):
        value = getattr(policy, one.name)
        if value != getattr(STOCK, one.name):
            departures.append(f"{one.name}={_plain(value)}")
    return " ".join(departures) or "stock"


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_plain, value))}]"
    if hasattr(value, "__dataclass_fields__"):
        parts = {name: part for name, part in asdict(value).items() if part not in (None, False) and name != "reason"}
        return "+".join(f"{name}:{part}" for name, part in parts.items())
    return str(value)


def decisions() -> str:
    """The table of all."""
    return rows_of(CASES)


def traces() -> str:
    """Of ten, all that was tried."""
    chosen = [CASES[seed] for seed in TRACED]
    return "\n".join(f"== {case.title}\n{one.trace}" for case, one in zip(chosen, in_processes(chosen), strict=True))


def rows_of(chosen: Sequence[Case]) -> str:
    """The rows of the table for these cases, under its heading."""
    return _table(chosen, in_processes(chosen))


def _table(chosen: Sequence[Case], found: Sequence[Decided]) -> str:
    head = ("seed", "workload", "budget", "objective", "variant", "regret", "seconds", "trials", "policy")
    lines = [
        (f"{case.seed}", case.workload, f"{case.budget_s:g} s", case.objective, case.variant, _percent(one.regret),
         f"{one.seconds:.4g}", f"{one.trials}", one.policy)
        for case, one in zip(chosen, found, strict=True)
    ]  # fmt: skip
    return "".join("{:>4}  {:<17}  {:>5}  {:<10}  {:<14}  {:>7}  {:>7}  {:>6}  {}\n".format(*x) for x in (head, *lines))


def _percent(regret: float) -> str:
    return f"{100 * regret:.1f} %" if regret < float("inf") else "slow"


def in_processes(chosen: Sequence[Case]) -> list[Decided]:
    """Each case decided, as many at once as there are cores, in processes whose sums do not depend on the machine."""
    before = {name: os.environ.get(name) for name in SAME_SUMS}
    os.environ.update(SAME_SUMS)
    alike = sorted(chosen, key=lambda case: (case.workload, case.variant))  # a process knows a space that it has met
    try:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, len(chosen)), mp_context=get_context("spawn")) as pool:
            found = dict(zip(alike, pool.map(decided, alike, chunksize=-(-len(chosen) // 20)), strict=True))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return [found[case] for case in chosen]


def versions() -> str:
    """What the sums of a search depend on besides amptune."""
    import optuna
    import scipy

    return f"numpy {np.__version__}, scipy {scipy.__version__}, optuna {optuna.__version__}"
