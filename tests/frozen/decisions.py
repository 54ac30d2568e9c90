"""Decisions of simulated tunings: what was tried in which order, what won, and what is claimed of it."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from optuna.storages import InMemoryStorage
from simulated.landscape import (
    SPACE,
    WORKLOADS,
    SimulatedClock,
    SyntheticEvaluator,
    Trouble,
    landscape_of,
    leaves,
)

from frozen.adapter import (
    STOCK,
    AmptuneError,
    Budget,
    Decision,
    Effort,
    Failure,
    GlobalBatch,
    LoopTiming,
    Measurement,
    Module,
    ModuleTrace,
    Outcome,
    Parity,
    Policy,
    Prepared,
    Reach,
    Source,
    StepProfile,
    TuningRequest,
    Wanted,
    amp_recipe,
    objective_of,
    tune_with,
)

__all__ = ["CASES", "VARIANTS", "Case", "HarnessEvaluator", "Variant", "decided", "decisions", "in_processes", "told"]

BUDGETS_S = (40.0, 80.0, 150.0, 300.0, 600.0)
OBJECTIVES = ("throughput", "memory", "energy")
# The module that fp16 breaks in, in the variant in which it does.
BREAKS = "stage2"
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
    pins: Mapping[str, str] | None = None
    fp16_breaks: bool = False
    flat: float | None = None


VARIANTS: Mapping[str, Variant] = {
    "plain": Variant(),
    "own space": Variant(space=None, batch_size=None),
    "troubled": Variant(trouble=Trouble(oom=0.2, throttlings=2.0)),
    "fp16 breaks": Variant(space=None, batch_size=None, fp16_breaks=True),
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
    trouble: Trouble | None = None

    @property
    def title(self) -> str:
        return f"{self.workload}, seed {self.seed}, {self.budget_s:g} s, {self.objective}, {self.variant}"


def _cases() -> Iterator[Case]:
    names = list(VARIANTS)
    product = itertools.product((0, 1), OBJECTIVES, BUDGETS_S, WORKLOADS)
    for number, (_, objective, budget_s, workload) in enumerate(product):
        # A workload meets another variant at each budget and objective.
        variant = names[(number + number // len(WORKLOADS)) % len(names)]
        yield Case(workload=workload, seed=number, budget_s=budget_s, objective=objective, variant=variant)


CASES = tuple(_cases())


class HarnessEvaluator(SyntheticEvaluator):
    """The synthetic machine, which counts joules and notes every question too; in `breaks` fp16 is not sound."""

    def __init__(self, case: Case, clock: SimulatedClock) -> None:
        variant = VARIANTS[case.variant]
        landscape = landscape_of(case.workload, variant.flat)
        super().__init__(landscape, clock, case.trouble or variant.trouble, case.seed)
        self.asked: list[str] = []
        self._fp16_breaks = variant.fp16_breaks

    def prepare(self, limit_s: float) -> Prepared:
        prepared = super().prepare(limit_s)
        modules = tuple(Module(path=leaf.path, types=(leaf.type, "Module")) for leaf in prepared.subject.leaves)
        return replace(prepared, subject=replace(prepared.subject, modules=modules))

    def launch(self, policies: Sequence[Policy]) -> None:
        self._note("launch", *policies)
        super().launch(policies)

    def compile(self, policies: Sequence[Policy], limit_s: float) -> Mapping[Policy, float]:
        self._note("compile", *policies)
        return super().compile(policies, limit_s)

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:
        self._note("compile", policy)
        super().begin_compiling(policy, limit_s)

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self._note("measure", policy)
        outcome = super().measure(policy, effort)
        if isinstance(outcome, Failure):
            return outcome
        return replace(outcome, energy_j_per_sample=_watts(policy) / outcome.samples_per_s)

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity:
        self._note("judge", policy)
        sound = super().judge(policy, fp32, seconds, limit_s)
        if not self._fp16_breaks or policy.autocast != "fp16" or any(r.path == BREAKS for r in policy.fp32_modules):
            return sound
        return Parity(failure=Failure(kind="nonfinite", message="the loss is nan in the first step of batch 1"))

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...]:  # noqa: ARG002
        self._note("trace", policy)
        kept = {rule.path for rule in policy.fp32_modules}
        broken = self._fp16_breaks and policy.autocast == "fp16" and BREAKS not in kept
        return tuple(_traced(leaf.path, leaf.type, broken=broken) for leaf in leaves())

    def profile(self, policy: Policy, limit_s: float) -> StepProfile:  # noqa: ARG002
        """A step of which a GPU runs two thirds."""
        ms = self.landscape.true_ms(policy)
        return StepProfile(
            device="cuda",
            steps=5,
            step_ms=ms,
            host_ms=0.9 * ms,
            gpu_busy_ms=2 * ms / 3,
            kernels=400.0,
            optimizer_ms=0.1 * ms,
        )

    def train(self, policy: Policy, seconds: float, limit_s: float) -> LoopTiming:  # noqa: ARG002
        """A loop that waits a tenth of its time for data."""
        ms = self.landscape.true_ms(policy)
        self.clock.advance(seconds)
        steps = max(1, int(1000 * seconds / (1.1 * ms)))
        samples = (policy.batch_size or self.landscape.own_batch_size) * policy.accumulate * steps
        return LoopTiming(
            samples_per_s=samples / seconds, steps=steps, seconds=seconds, wait_ms=0.1 * ms, copy_ms=0.01 * ms,
            step_ms=ms, idle_ms=0.1 * ms, host_ms=0.5 * ms, busy_ms=0.99 * ms,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, what: str, *policies: Policy) -> None:
        self.asked.append(f"{what} {' | '.join(map(told, policies))}")


def _traced(path: str, kind: str, *, broken: bool) -> ModuleTrace:
    """Sound numbers; where a dtype breaks, `BREAKS` gives what is not finite, and what follows it gets that."""
    fine = Reach(largest=2.0, largest_fp32=2.0, error=0.001)
    lost = Reach(largest=float("inf"), largest_fp32=2.0, error=float("inf"))
    order = [leaf.path for leaf in leaves()]
    comes = lost if broken and order.index(path) > order.index(BREAKS) else fine
    goes = lost if broken and order.index(path) >= order.index(BREAKS) else fine
    return ModuleTrace(
        path=path, type=kind, inputs=comes, outputs=goes, gradients_in=fine, gradients_out=fine, weights=fine
    )


def _watts(policy: Policy) -> float:
    """Half precision and compiled kernels draw less, a larger batch a little more: plausible, not measured."""
    precision = {"off": 650.0, "bf16": 520.0, "fp16": 500.0}[policy.autocast]
    return precision * (0.93 if policy.compile != "off" else 1.0) * (1.02 if policy.batch_size else 1.0)


def decided(case: Case) -> str:
    """Tunes once in simulated time, and tells what became of it."""
    clock = SimulatedClock()
    evaluator = HarnessEvaluator(case, clock)
    with tempfile.TemporaryDirectory() as folder:
        try:
            decision = tune_with(evaluator, _request(case, clock, Path(folder)), lambda _: None)
        except AmptuneError as error:
            return f"{type(error).__name__}: {error}\n{_asked(evaluator)}"
    return f"{_told_of(decision)}{_asked(evaluator)}"


def _request(case: Case, clock: SimulatedClock, folder: Path) -> TuningRequest:
    variant = VARIANTS[case.variant]
    whole = None if variant.whole is None else variant.whole * landscape_of(case.workload).own_batch_size
    return TuningRequest(
        source=Source(target="synthetic"),
        wanted=Wanted(
            baseline=variant.baseline,
            space=variant.space,
            pins=variant.pins or {},
            batch_size=variant.batch_size,
            global_batch=None if whole is None else GlobalBatch(samples=whole),
            compile=variant.compile,
        ),
        budget=Budget(seconds=case.budget_s, trials=variant.trials, started=clock(), clock=clock),
        folder=folder,
        study=InMemoryStorage(),  # type: ignore[arg-type]  # Optuna takes one; a journal's 8 ms a trial are saved
        seed=case.seed,
        objective=objective_of(case.objective, None),
    )


def _told_of(decision: Decision) -> str:
    codes = " ".join(finding.code for finding in decision.findings)
    tried = "".join(f"  {told(trial.policy)}{_failed(trial.outcome)}\n" for trial in decision.trials)
    return (
        f"policy: {told(decision.policy)}\n"
        f"claim: {_interval(decision.speedup)}, gain {_interval(decision.gain)}, "
        f"{'provisional' if decision.provisional else 'final'}\n"
        f"findings: {codes}\n"
        f"tried: {len(decision.trials)}\n{tried}"
    )


def _interval(ratio: Any) -> str:
    return f"{ratio.value:.4g} [{ratio.low:.4g}, {ratio.high:.4g}]"


def _failed(outcome: Outcome) -> str:
    return "" if isinstance(outcome, Measurement) else f"  ({outcome.kind})"


def _asked(evaluator: HarnessEvaluator) -> str:
    """How often the machine was asked what, and a digest of all questions in their order."""
    kinds = [line.split(" ", 1)[0] for line in evaluator.asked]
    counts = ", ".join(f"{kind} {kinds.count(kind)}" for kind in sorted(set(kinds)))
    digest = hashlib.sha256("\n".join(evaluator.asked).encode()).hexdigest()[:16]
    return f"asked: {counts}; in {evaluator.clock():.4g} s; {digest}\n"


def told(policy: Policy) -> str:
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


def decisions(cases: Sequence[Case] = CASES) -> dict[str, str]:
    """A page a workload: every case with what was decided, in the order of the cases."""
    found = in_processes(cases)
    pages: dict[str, str] = {}
    for case, text in zip(cases, found, strict=True):
        name = f"decisions/{case.workload}.txt"
        pages[name] = pages.get(name, "") + f"== {case.title}\n{text}\n"
    return pages


def in_processes(cases: Sequence[Case]) -> list[str]:
    """Each case decided, as many at once as there are cores, in processes whose sums do not depend on the machine."""
    before = {name: os.environ.get(name) for name in SAME_SUMS}
    os.environ.update(SAME_SUMS)
    try:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            return list(pool.map(decided, cases, chunksize=5))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def versions() -> str:
    """What the sums of a search depend on besides amptune."""
    import optuna
    import scipy

    return f"numpy {np.__version__}, scipy {scipy.__version__}, optuna {optuna.__version__}"
