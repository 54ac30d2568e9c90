"""Which sampler finds a fast policy soonest? Searches replayed on tables of known speeds, suggesting included.

    OMP_NUM_THREADS=1 python reports/samplers.py --out reports/samplers.json
    OMP_NUM_THREADS=1 python reports/samplers.py --out reports/samplers.json --tables reports/h200/oracle
    python reports/samplers.py --out reports/samplers.json --table

A trial takes as long as it was recorded to, in simulated time; a suggestion takes as long as it really does, on this
machine. Tables: the grid of tests/simulated/h200_grid.json; every oracle (`oracle.py`) in the folder `--tables`, in
which what was not compiled is taken to gain by compiling what the nearest compiled policy gained; and the synthetic
landscapes of tests/simulated/landscape.py, without and with a search for the batch size ("batches"). Measurements are
noisy, and some are outliers.

All samplers measure the same known-good policies first, are told of a repeat without measuring it again, and are told
of a failure as a violated constraint. Regret is the speed of the truly fastest policy over the true speed of the one
that looked fastest so far, less 1.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

# The landscape and the grid are made for the tests and live among them; they are no part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, PartialFixedSampler, TPESampler
from optuna.storages import InMemoryStorage
from oracle import Oracle, read  # beside this program
from simulated.landscape import (  # found by the line above
    SimulatedClock,
    SyntheticEvaluator,
    Trouble,
    landscape_of,
    wanted,
)
from simulated.recorded import RecordedEvaluator, recorded_ms

from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.compiled_graphs import CompiledGraphs
from amptune.search.plan.budget import Budget
from amptune.search.plan.plan import Plan
from amptune.search.sampler.study import Study, open_study
from amptune.search.space.candidates import candidates_for
from amptune.search.space.knobs import Dimension, Forbidden, Point, Space, Value, forbidden_because, points
from amptune.search.table.trial import Trial
from amptune.search.trials import Trials

SCHEMA = "amptune.samplers/1"
GRID = Path(__file__).resolve().parent.parent / "tests" / "simulated" / "h200_grid.json"
LIMIT_S = 160.0
LOOKS_S = (10.0, 20.0, 40.0, 80.0, 160.0)
NEAR = (0.03, 0.01)
SEEDS = 20
# A suggestion of the Gaussian process takes up to a second: fewer tunings of it fit into a quarter of an hour.
DEAR_SEEDS = 4
WORKLOADS = ("conv1", "resnet18", "resnet50", "vgg16_cifar", "densenet161_cifar", "seresnext50_cifar", "deeplabv3p")
BATCH_FACTORS = (0.5, 1, 2, 4, 8, 16)
# One measurement: Gaussian on the logarithm, and this share of outliers, slower by so much.
NOISE, OUTLIERS, OUTLIER_BY = 0.02, 0.05, (0.10, 0.60)
# A trial beside its warm-up, in a worker that runs (an H200, torch 2.11).
TRIAL_S = 1.2
FAILED_TRIAL_S = 1.0
# What max-autotune takes beyond compiling, which the landscape does not know of.
AUTOTUNE_S = 45.0
EFFORT = Effort(time_limit_s=240.0)
# No further apart than this are two policies that differ in nothing that plans are made for.
SAME_PLANS = 1
# Suggested so often in a row what was measured already, a sampler has nothing new to say.
MOST_REPEATS = 50
# In the order of what a knob is worth on an H200, what is dear last.
IMPORTANCE = (
    "autocast", "memory_format", "fp32_math", "batch_size", "fused_optimizer", "fp32_exclusions", "compile",
    "cudnn_benchmark",
)  # fmt: skip
# The first stage of the staged samplers, and how much of the time it may take.
CHEAP: Mapping[str, Value] = {"compile": "off", "cudnn_benchmark": False}
CHEAP_SHARE = 0.4
STARTUP_TRIALS, ENQUEUED_MORE = 10, 2

Proposals = Generator[Policy, Outcome, None]


# --- what is known ------------------------------------------------------------------------------------------------


class Clock(SimulatedClock):
    """Simulated seconds, and the real ones in which a sampler thinks."""

    def __init__(self) -> None:
        super().__init__()
        self._started_s = time.perf_counter()
        self._not_thinking_s = 0.0

    def __call__(self) -> float:
        return self.now_s + time.perf_counter() - self._started_s - self._not_thinking_s

    def without_thinking(self, act: Callable[[], Outcome]) -> Outcome:
        """The result of what is done in simulated time alone."""
        began_s = time.perf_counter()
        try:
            return act()
        finally:
            self._not_thinking_s += time.perf_counter() - began_s


Measure = Callable[[Policy, Effort], Outcome]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A space, and the true speed of every policy in it: samples per second, 0 for one that fails.

    `machine` gives a function that measures in the time of a clock, with noise of a seed. `first` are known-good.
    """

    name: str
    space: Space
    policy_of: Callable[[Point], Policy]
    speed: Callable[[Policy], float]
    machine: Callable[[Clock, int], Measure]
    first: tuple[Policy, ...]
    points: Mapping[Policy, Point] = field(default_factory=dict)
    best: float = 0.0

    @staticmethod
    def of(**parts: Any) -> Table:
        """With what follows from the rest."""
        table = Table(**parts)
        found: dict[Policy, Point] = {}
        for point in points(table.space):
            found.setdefault(table.policy_of(point), point)
        first = tuple(policy for policy in table.first if policy in found)
        return replace(table, points=found, first=first, best=max(map(table.speed, found)))


# What a trial takes, by its policy and whether its graphs were compiled and its plans timed before.
Seconds = Callable[[Policy, bool], float]


@dataclass
class Recording:
    """Measures from recorded figures: `ms` is infinite for what fails."""

    ms: Callable[[Policy], float]
    seconds: Seconds
    batch_size: int
    clock: Clock
    rng: random.Random
    known: set[Policy] = field(default_factory=set)

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        same = replace(policy, fused_optimizer=False)  # has the same graphs and plans
        seconds, ms = self.seconds(policy, same in self.known), self.ms(policy)
        self.known.add(same)
        self.clock.advance(min(seconds, effort.time_limit_s))
        if seconds > effort.time_limit_s:
            return Failure(kind="timeout", message="the trial did not end in time")
        if math.isinf(ms):
            return Failure(kind="oom", message="as recorded")
        outlier = 1 + self.rng.uniform(*OUTLIER_BY) if self.rng.random() < OUTLIERS else 1.0
        measured = ms * math.exp(self.rng.gauss(0.0, NOISE)) * outlier
        return _measurement(measured, self.batch_size)


def _measurement(ms: float, samples: int) -> Measurement:
    return Measurement(
        samples_per_step=samples,
        step_ms=(ms,) * 5,
        warmup_s=0.2,
        warmup_steps=10,
        peak_allocated_mib=1000.0,
        peak_reserved_mib=1000.0,
        losses=(7.0, 6.9, 6.8),
    )


WITHOUT_EFFECT = Forbidden(
    when=(("autocast", ("bf16", "fp16")), ("fp32_math", ("tf32", "ieee"))),
    because="every matrix product then runs in half precision",
)


def _recorded(
    name: str, knobs: Sequence[Dimension], ms: Callable[[Policy], float], seconds: Seconds, samples: int
) -> Table:
    """The space of these knobs, with what a Hopper's space tries first."""
    layouts = next((knob.choices for knob in knobs if knob.name == "memory_format"), ("contiguous",))
    halves = [amp_recipe(dtype, memory_format=layout) for layout in layouts for dtype in ("bf16", "fp16")]
    full = [Policy(fp32_math=math, memory_format=layout) for math in ("tf32", "stock") for layout in layouts]  # type: ignore[arg-type]

    def machine(clock: Clock, seed: int) -> Measure:
        return Recording(ms, seconds, samples, clock, random.Random(seed)).measure  # noqa: S311  # noise, no secret

    return Table.of(
        name=name,
        space=Space(architecture=name, compute_capability=(), knobs=tuple(knobs), forbid=(WITHOUT_EFFECT,)),
        policy_of=lambda point: Policy(**point),
        speed=lambda policy: 1000 * samples / ms(policy),
        machine=machine,
        first=tuple(dict.fromkeys([STOCK, *halves, *full])),
    )


EAGER_KNOBS = (
    Dimension(name="autocast", choices=("off", "bf16", "fp16")),
    Dimension(name="fp32_math", choices=("stock", "tf32", "ieee")),
)
CONVOLUTION_KNOBS = (
    Dimension(name="memory_format", choices=("contiguous", "channels_last")),
    Dimension(name="cudnn_benchmark", choices=(False, True)),
)


def grid_table(workload: str) -> Table:
    """The eager grid of 2026-11-21; what was not recorded is taken from beside it, as in the tests."""
    rows = json.loads(GRID.read_text())["rows"]
    own = [row for row in rows if row["workload"] == workload and row["compile"] == "off"]
    warmups = [row["warmup_s"] for row in own if row["cudnn_benchmark"]]
    benchmark_s = statistics.fmean(warmups) if warmups else 0.0

    def seconds(policy: Policy, known: bool) -> float:
        return TRIAL_S + (benchmark_s if policy.cudnn_benchmark and not known else 0.2)

    knobs = (*EAGER_KNOBS, *CONVOLUTION_KNOBS)
    ms = {policy: recorded_ms(workload, policy) for policy in _policies(knobs)}
    return _recorded(f"grid {workload}", knobs, ms.__getitem__, seconds, own[0]["batch_size"])


def _policies(knobs: Sequence[Dimension]) -> list[Policy]:
    space = Space(architecture="", compute_capability=(), knobs=tuple(knobs))
    return [Policy(**point) for point in points(space)]  # type: ignore[arg-type]


def oracle_table(oracle: Oracle) -> Table:
    """An oracle's rows. Compiling gains what it gained the nearest policy, and costs what it did there."""
    rows = {row.policy: row for row in oracle.rows}
    modes = tuple(dict.fromkeys(row.policy.compile for row in oracle.rows))
    knobs = [*EAGER_KNOBS, Dimension(name="fused_optimizer", choices=(False, True))]
    knobs += [*(CONVOLUTION_KNOBS if oracle.machine["convolutions"] else ()), Dimension(name="compile", choices=modes)]

    @cache
    def ms(policy: Policy) -> float:
        if policy in rows:
            return rows[policy].ms
        eager = rows.get(replace(policy, compile="off"))
        near = [row for row in oracle.rows if row.policy.compile == policy.compile]
        if eager is None or not near:
            return math.inf
        nearest = min(near, key=lambda row: _differences(row.policy, policy))
        return eager.ms * nearest.ms / rows[replace(nearest.policy, compile="off")].ms

    @cache
    def seconds(policy: Policy, known: bool) -> float:
        """Of those as dear as it: the dearest had something to compile or to time, the cheapest had not."""
        kind = (policy.compile, policy.cudnn_benchmark)
        alike = [row for row in oracle.rows if (row.policy.compile, row.policy.cudnn_benchmark) == kind]
        alike = alike or [row for row in oracle.rows if row.policy.compile == policy.compile]
        own = [row for row in alike if _differences(row.policy, policy) <= SAME_PLANS] or alike
        costs = [row.seconds for row in own]
        return (min if known else max)(costs, default=FAILED_TRIAL_S)

    return _recorded(f"oracle {oracle.machine['workload']}", knobs, ms, seconds, oracle.machine["batch_size"])


def _differences(a: Policy, b: Policy) -> int:
    """How far two policies are apart, dtype and layout before the rest."""
    weights = {"autocast": 4, "memory_format": 3, "fp32_math": 2}
    return sum(
        weights.get(name, 1) * (getattr(a, name) != getattr(b, name))
        for name in ("autocast", "memory_format", "fp32_math", "fused_optimizer", "cudnn_benchmark")
    )


def landscape_table(workload: str, *, batches: bool) -> Table:
    """1,700 policies, exclusions among them; with batch sizes over 10,000, where too large a one is out of memory."""
    landscape = landscape_of(workload)
    own = landscape.own_batch_size
    sizes = sorted({max(1, int(factor * own)) for factor in BATCH_FACTORS}) if batches else ()
    candidates = candidates_for(landscape.prepared, wanted(), sizes=sizes)

    @cache
    def speed(policy: Policy) -> float:
        return landscape.samples_per_s(policy) if landscape.fits(policy) else 0.0

    def machine(clock: Clock, seed: int) -> Measure:
        # No drift: nothing could then be said of a search by its own measurements alone.
        evaluator = SyntheticEvaluator(landscape, clock, Trouble(drift=0.0), seed)
        tuned: set[Policy] = set()

        def measure(policy: Policy, effort: Effort) -> Outcome:
            if policy.compile.startswith("max-autotune") and policy not in tuned:
                clock.advance(AUTOTUNE_S)
                tuned.add(policy)
            return evaluator.measure(policy, effort)

        return measure

    return Table.of(
        name=f"{'batches' if batches else 'landscape'} {workload}",
        space=candidates.space,
        policy_of=candidates.policy_of,
        speed=speed,
        machine=machine,
        first=tuple(replace(policy, batch_size=own) for policy in candidates.first),
    )


# --- who searches -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    """A table to search in so much time, by a clock, and the seed of whatever is drawn."""

    table: Table
    clock: Clock
    seed: int
    limit_s: float = LIMIT_S

    @property
    def cheap_until_s(self) -> float:
        return CHEAP_SHARE * self.limit_s


def at_random(task: Task) -> Proposals:
    policies = list(task.table.points)
    random.Random(task.seed).shuffle(policies)  # noqa: S311  # no secret
    for policy in dict.fromkeys([*task.table.first, *policies]):  # noqa: UP028  # `yield from` cannot send to it
        yield policy


def knob_by_knob(task: Task) -> Proposals:
    """Coordinate descent: each knob in turn, every choice of it, from the best so far; then from a random policy."""
    table, rng = task.table, random.Random(task.seed)  # noqa: S311  # no secret
    scores: dict[Policy, float] = {}
    for policy in table.first:
        scores[policy] = speed_of((yield policy))
    start = max(scores, key=scores.__getitem__)
    while len(scores) < len(table.points):
        before, best = -1.0, start
        while scores[best] > before:
            before = scores[best]
            for policy in (one for name in IMPORTANCE for one in variants(table, best, name)):
                if policy not in scores:
                    scores[policy] = speed_of((yield policy))
                if scores[policy] > scores[best]:
                    best = policy
        start = rng.choice([policy for policy in table.points if policy not in scores] or [best])
        if start not in scores:
            scores[start] = speed_of((yield start))


def variants(table: Table, policy: Policy, name: str) -> list[Policy]:
    """The policy with every other choice of one knob."""
    point = table.points[policy]
    changed = [Point({**point, name: choice}) for choice in table.space.choices(name) if choice != point[name]]
    allowed = [repaired(table.space, one) for one in changed]
    return [table.policy_of(one) for one in allowed if one is not None]


def repaired(space: Space, point: Point) -> Point | None:
    """The point, or what comes closest to it that is allowed: settings without effect put back."""
    stock = {name: value for name, value in (("fp32_math", "stock"), ("fp32_exclusions", 0)) if name in point}
    tries = [point, *(Point({**point, name: value}) for name, value in stock.items()), Point({**point, **stock})]
    return next((one for one in tries if forbidden_because(space, one) is None), None)


def by_optuna(sampler: Callable[[int, int], BaseSampler], *, staged: bool = False) -> Callable[[Task], Proposals]:
    """Optuna's sampler, made of a seed and the number of start-up trials."""

    def proposals(task: Task) -> Proposals:
        table = task.table
        asking = _Asking(task, sampler(task.seed, len(table.first) + ENQUEUED_MORE))
        for policy in table.first:
            asking.study.enqueue_trial(asking.parameters(policy))
            yield from asking.once()
        if staged:
            yield from _stages(asking)
        while True:
            yield from asking.once()

    return proposals


class _Asking:
    """Optuna's ask and tell over one table. Numbers are asked for by their place among the choices."""

    def __init__(self, task: Task, sampler: BaseSampler) -> None:
        self.task, self.sampler = task, sampler
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self._knobs = {knob.name: knob.choices for knob in task.table.space.knobs}
        self._distributions = {name: _distribution(choices) for name, choices in self._knobs.items()}
        self.values: dict[Policy, float] = {}

    def parameters(self, policy: Policy) -> dict[str, Value]:
        point = self.task.table.points[policy]
        return {
            name: choices.index(point[name]) if _ordered(choices) else point[name]
            for name, choices in self._knobs.items()
        }

    @property
    def best(self) -> Policy:
        return max(self.values, key=self.values.__getitem__)

    def once(self) -> Proposals:
        """Asks, and tells what became of it; nothing where the sampler wants what is not allowed."""
        table = self.task.table
        trial = self.study.ask(self._distributions)
        asked = {
            name: choices[trial.params[name]] if _ordered(choices) else trial.params[name]
            for name, choices in self._knobs.items()
        }
        point = repaired(table.space, Point(asked))
        if point is None:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        policy = table.policy_of(point)
        speed = speed_of((yield policy))
        worst = min(self.values.values(), default=0.0) + math.log(0.7)
        value = math.log(speed) if speed else worst
        trial.set_constraint("feasible", 0.0 if speed else 1.0)
        self.study.tell(trial, value)
        if speed:
            self.values[policy] = value


def _stages(asking: _Asking) -> Proposals:
    """Eager and without cudnn.benchmark; then the best of those compiled; then with cudnn.benchmark."""
    fixed = {name: value for name, value in CHEAP.items() if name in asking.parameters(asking.task.table.first[0])}
    if not fixed:
        return
    asking.study.sampler = _partly_fixed(fixed, asking.sampler)
    cheap = sum(all(getattr(policy, n) == v for n, v in fixed.items()) for policy in asking.task.table.points)
    asked = 0
    while asking.task.clock() < asking.task.cheap_until_s and len(asking.values) < cheap and asked < 2 * cheap:
        yield from asking.once()
        asked += 1
    for name in fixed:
        parameters = asking.parameters(asking.best)
        others = {other: value for other, value in parameters.items() if other != name}
        asking.study.sampler = _partly_fixed(others, asking.sampler)
        for _ in range(2 * len(asking.task.table.space.choices(name))):
            yield from asking.once()
    asking.study.sampler = asking.sampler


def _partly_fixed(fixed: Mapping[str, Value], sampler: BaseSampler) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return PartialFixedSampler(dict(fixed), sampler)


def _ordered(choices: Sequence[Value]) -> bool:
    return all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices)


def _distribution(choices: Sequence[Value]) -> BaseDistribution:
    return IntDistribution(0, len(choices) - 1) if _ordered(choices) else CategoricalDistribution(choices)


def _tpe(seed: int, startup: int) -> BaseSampler:
    return TPESampler(seed=seed, n_startup_trials=max(STARTUP_TRIALS, startup))


def _gp(seed: int, startup: int) -> BaseSampler:
    return GPSampler(seed=seed, n_startup_trials=max(STARTUP_TRIALS, startup))


def _study_of(task: Task) -> Study:
    table = task.table
    study = open_study(
        InMemoryStorage(),  # type: ignore[arg-type]  # Optuna takes one; a journal takes 8 ms a trial more
        table.name,
        table.space,
        table.policy_of,
        seed=task.seed,
        baseline=table.first[0],
    )
    study.measure_first(table.first)
    return study


def by_proposer(task: Task) -> Proposals:
    """Amptune's study without the stages of its search: whatever promises most for its time."""
    study = _study_of(task)
    while (suggestion := study.suggest()) is not None:
        before_s = task.clock()
        outcome = yield suggestion.policy
        seconds = task.clock() - before_s
        trial = Trial(number=len(study.trials), policy=suggestion.policy, outcome=outcome, seconds=seconds)
        study.tell(suggestion, trial)


SAMPLERS: Mapping[str, Callable[[Task], Proposals]] = {
    "random": at_random,
    "knob by knob": knob_by_knob,
    "TPE": by_optuna(_tpe),
    "TPE staged": by_optuna(_tpe, staged=True),
    "GP": by_optuna(_gp),
    "amptune unstaged": by_proposer,
}
OURS = "amptune"
DEAR = ("GP",)


# --- how well -----------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """An evaluator that notes how good the best so far truly is, whenever that changes."""

    task: Task
    measure_once: Measure
    regrets: list[tuple[float, float]] = field(default_factory=list)
    trials: int = 0
    _best: float = 0.0

    def measure(self, policy: Policy, effort: Effort = EFFORT) -> Outcome:
        outcome = self.task.clock.without_thinking(lambda: self.measure_once(policy, effort))
        self.trials += 1
        if speed_of(outcome) > self._best:
            self._best = speed_of(outcome)
            regret = self.task.table.best / self.task.table.speed(policy) - 1
            self.regrets.append((self.task.clock(), regret))
        return outcome


def speed_of(outcome: Outcome) -> float:
    """0 where it failed."""
    return outcome.samples_per_s if isinstance(outcome, Measurement) else 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One search: the regret at each of LOOKS_S, the seconds until it stays below each of NEAR, None for never.

    A regret is infinite before the first trial ended.
    """

    table: str
    sampler: str
    seed: int
    regrets: tuple[float, ...]
    near_s: tuple[float | None, ...]
    trials: int
    thinking_s: float


def searched(table: Table, sampler: str, seed: int) -> Run:
    """One search of the table, to its end or that of the time."""
    clock = Clock()
    task = Task(table=table, clock=clock, seed=seed)
    watched = Watched(task, table.machine(clock, seed))
    if sampler == OURS:
        _search_as_shipped(task, watched)
    else:
        _follow(SAMPLERS[sampler](task), task, watched)
    ended_s = min(clock(), LIMIT_S)
    return Run(
        table=table.name,
        sampler=sampler,
        seed=seed,
        regrets=tuple(regret_at(watched.regrets, look_s) for look_s in LOOKS_S),
        near_s=tuple(stays_below(watched.regrets, near) for near in NEAR),
        trials=watched.trials,
        thinking_s=max(0.0, ended_s - clock.now_s),
    )


def _search_as_shipped(task: Task, watched: Watched) -> None:
    budget = Budget(seconds=task.limit_s, started=0.0, clock=task.clock)
    evaluator = RecordedEvaluator(workload="", graphs_at_once=0)
    evaluator.measure = watched.measure  # type: ignore[method-assign]  # everything else is never asked for
    study, baseline = _study_of(task), task.table.first[0]
    graphs = CompiledGraphs(study, evaluator, budget, baseline, lambda _: None)
    trials = Trials(study, evaluator, budget, baseline, lambda _: None, graphs)
    Plan(budget).carry_out([[trials.wants, trials.compiling]], lambda: 0.0)


def _follow(proposals: Proposals, task: Task, watched: Watched) -> None:
    outcomes: dict[Policy, Outcome] = {}
    repeats = 0
    policy = next(proposals, None)
    while policy is not None and task.clock() < task.limit_s and repeats < MOST_REPEATS:
        repeats = repeats + 1 if policy in outcomes else 0
        if policy not in outcomes:
            outcomes[policy] = watched.measure(policy)
        try:
            policy = proposals.send(outcomes[policy])
        except StopIteration:
            return


def regret_at(regrets: Sequence[tuple[float, float]], look_s: float) -> float:
    """The last that was reached by then; infinite before the first."""
    return next((regret for at_s, regret in reversed(regrets) if at_s <= look_s), math.inf)


def stays_below(regrets: Sequence[tuple[float, float]], near: float) -> float | None:
    """When the regret falls below `near` for good; None if it does not in time."""
    since: float | None = None
    for at_s, regret in regrets:
        if at_s <= LIMIT_S:
            since = None if regret > near else at_s if since is None else since
    return since


@dataclass(frozen=True, kw_only=True)
class Row:
    """Many searches of a table, or of several: medians and 90th percentiles of what `Run` holds."""

    table: str
    sampler: str
    searches: int
    median: tuple[float, ...]
    p90: tuple[float, ...]
    near_median_s: tuple[float, ...]
    near_p90_s: tuple[float, ...]
    trials: float
    thinking_s: float


def row_of(table: str, runs: Sequence[Run]) -> Row:
    """A time that was not reached counts as infinite."""
    looks = list(zip(*(run.regrets for run in runs), strict=True))
    nears = [[math.inf if s is None else s for s in of] for of in zip(*(run.near_s for run in runs), strict=True)]
    return Row(
        table=table,
        sampler=runs[0].sampler,
        searches=len(runs),
        median=tuple(quantile(of, 0.5) for of in looks),
        p90=tuple(quantile(of, 0.9) for of in looks),
        near_median_s=tuple(quantile(of, 0.5) for of in nears),
        near_p90_s=tuple(quantile(of, 0.9) for of in nears),
        trials=statistics.median(run.trials for run in runs),
        thinking_s=statistics.median(run.thinking_s for run in runs),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed; infinite ones are values too."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """For each kind of table all of its searches together, then for each table, a row a sampler."""
    kinds = list(dict.fromkeys(run.table.split()[0] for run in runs))
    tables = list(dict.fromkeys(run.table for run in runs))
    samplers = list(dict.fromkeys(run.sampler for run in runs))
    groups = [(f"**{kind}, all**", [run for run in runs if run.table.split()[0] == kind]) for kind in kinds]
    groups += [(table, [run for run in runs if run.table == table]) for table in tables]
    return [
        row_of(name, own)
        for name, group in groups
        for sampler in samplers
        if (own := [run for run in group if run.sampler == sampler])
    ]


def table_of(runs: Sequence[Run]) -> str:
    """Regret in percent, median and 90th percentile, as Markdown."""
    heads = ["table", "sampler", "searches", *(f"{look_s:.0f} s" for look_s in LOOKS_S)]
    heads += [*(f"within {near:.0%} after" for near in NEAR), "trials", "suggesting"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows_of(runs):
        cells = [row.table, row.sampler, str(row.searches)]
        cells += [f"{_percent(a)} / {_percent(b)}" for a, b in zip(row.median, row.p90, strict=True)]
        cells += [f"{_seconds(a)} / {_seconds(b)}" for a, b in zip(row.near_median_s, row.near_p90_s, strict=True)]
        lines.append(f"| {' | '.join([*cells, f'{row.trials:.0f}', f'{row.thinking_s:.1f} s'])} |")
    return "\n".join(lines)


def _percent(regret: float) -> str:
    return "-" if math.isinf(regret) else f"{100 * regret:.1f} %"


def _seconds(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds:.0f} s"


# --- all of them --------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", type=Path, metavar="DIR", help="what oracle.py wrote")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--dear-seeds", type=int, default=DEAR_SEEDS, help=f"of {', '.join(DEAR)}")
    parser.add_argument("--samplers", nargs="*", default=[*SAMPLERS, OURS], choices=[*SAMPLERS, OURS], metavar="NAME")
    parser.add_argument("--only", default="", metavar="WORD", help="tables whose names hold it")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    arguments = parser.parse_args()
    runs = kept_in(arguments.out)
    if not arguments.table:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        tables = [table for table in tables_in(arguments.tables) if arguments.only in table.name]
        found = all_searches(tables, arguments.samplers, arguments.seeds, arguments.dear_seeds)
        again = {(run.table, run.sampler) for run in found}
        runs = [run for run in runs if (run.table, run.sampler) not in again] + found
        write(arguments.out, runs)
    print(table_of(runs))
    return 0


def tables_in(folder: Path | None) -> list[Table]:
    """Every table there is."""
    oracles = [read(path) for path in sorted(folder.glob("*.jsonl"))] if folder else []
    return [
        *(oracle_table(oracle) for oracle in oracles if oracle is not None),
        *map(grid_table, WORKLOADS),
        *(landscape_table(workload, batches=batches) for batches in (False, True) for workload in WORKLOADS),
    ]


def all_searches(tables: Sequence[Table], samplers: Collection[str], seeds: int, dear_seeds: int) -> list[Run]:
    runs: list[Run] = []
    for table in tables:
        for sampler in samplers:
            began_s = time.perf_counter()
            runs += [searched(table, sampler, seed) for seed in range(dear_seeds if sampler in DEAR else seeds)]
            print(f"{table.name}: {sampler}: {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
    return runs


def write(path: Path, runs: Sequence[Run]) -> None:
    """One line a run."""
    rows = [
        {
            "table": run.table,
            "sampler": run.sampler,
            "seed": run.seed,
            "regrets": [None if math.isinf(regret) else round(regret, 5) for regret in run.regrets],
            "near_s": [None if seconds is None else round(seconds, 1) for seconds in run.near_s],
            "trials": run.trials,
            "thinking_s": round(run.thinking_s, 2),
        }
        for run in runs
    ]
    head = {"schema": SCHEMA, "looks_s": LOOKS_S, "near": NEAR, "limit_s": LIMIT_S}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')


def kept_in(path: Path) -> list[Run]:
    rows = json.loads(path.read_text())["runs"] if path.exists() else []
    return [
        Run(
            table=row["table"],
            sampler=row["sampler"],
            seed=row["seed"],
            regrets=tuple(math.inf if regret is None else regret for regret in row["regrets"]),
            near_s=tuple(row["near_s"]),
            trials=row["trials"],
            thinking_s=row["thinking_s"],
        )
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
