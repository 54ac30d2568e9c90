"""Contenders: the policies of the table, each with its figures. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import Policy
from amptune.search.table.effects import Machine
from amptune.search.table.model import Estimates
from amptune.search.table.objective import KNOWN_TO, NEGLIGIBLE, Objective
from amptune.search.table.ratio import LIKELY, Ratio
from amptune.search.table.row import Row, are_alike, contradicts_trials, decisive, settled_in

__all__ = ["PROCESSES", "Contender", "contenders_of"]

# Launches differ more than blocks within one: nothing is confirmed by fewer processes.
PROCESSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One policy's figures in the table. They are None if it failed, and `failure` says how.

    `vs_baseline` compares samples per second, `gain` the figure of the objective, both in a later sitting; `chance` is
    the probability that it is better than the baseline by the objective, `fast_enough` that it has the speed that the
    objective needs. A policy that is `too_slow` cannot win, nor one that is not `settled`. `in_loop` tells if it was
    timed in the user's loop, `alike` if its steps take about the same multiple of the baseline's. One that is not
    `believed` has its trial alone, and the loop said otherwise of another's. All rows of a `disturbed` one were
    disturbed. `lost` says why it did not win; empty for the winner.
    """

    policy: Policy
    samples_per_s: float | None = None
    step_ms: float | None = None
    step_ms_ci95: tuple[float, float] | None = None
    peak_memory_mib: float | None = None
    energy_j_per_sample: float | None = None
    vs_baseline: Ratio | None = None
    gain: Ratio | None = None
    chance: float = 0.0
    fast_enough: float = 1.0
    disturbed: bool = False
    settled: bool = True
    in_loop: bool = False
    alike: bool = True
    believed: bool = True
    rows: int = 0
    failure: Failure | None = None
    lost: str = ""

    @property
    def speedup(self) -> float:
        """The ratio of its samples per second to the baseline's; 0 if it failed or the ratio is unknown."""
        return 0.0 if self.vs_baseline is None else self.vs_baseline.value

    @property
    def merit(self) -> float:
        """The gain over the baseline by the objective; 0 if it failed or the gain is unknown."""
        return 0.0 if self.gain is None else self.gain.value

    @property
    def too_slow(self) -> bool:
        """True if it is rather too slow for the objective than not."""
        return self.fast_enough < 0.5

    @property
    def may_win(self) -> bool:
        """True if it runs, is not likely too slow, and more rows may show that it is the best."""
        is_likely_slow = 1 - self.fast_enough > LIKELY
        return self.failure is None and self.gain is not None and self.settled and not is_likely_slow

    @property
    def is_shown(self) -> bool:
        """True if it is likely better than the baseline. If it may also be worse, its steps have to be alike."""
        certain = self.gain is not None and self.gain.low > 1
        return self.chance >= LIKELY and not self.too_slow and self.believed and (certain or self.alike)

    @property
    def place(self) -> tuple[bool, bool, float, float]:
        """The sort key of contenders: the best first, then policies that are too slow, failures last."""
        return self.failure is not None, self.too_slow, -self.merit, -(self.samples_per_s or 0.0)


def contenders_of(
    rows: Sequence[Row], scores: Estimates, speeds: Estimates, objective: Objective, machine: Machine
) -> Iterator[Contender]:
    """Yields each policy of the table with its figures: estimates by the objective, and of samples per second."""
    shows_alone = machine.shows_alone or objective.name == "memory"
    of, timed, settled = _by_policy(rows), _by_policy(decisive(rows)), settled_in(rows)
    baseline = scores.policies[scores.baseline]
    figures = _newest_figures(timed[baseline])
    contradicted = objective.name != "memory" and contradicts_trials(rows, baseline)
    for policy, own in of.items():
        failure = next((row.outcome for row in reversed(own) if isinstance(row.outcome, Failure)), None)
        if failure is not None and policy != baseline:
            yield Contender(policy=policy, failure=failure, rows=len(own))  # a policy that sometimes fails is useless
        elif policy in timed:
            found = _measured(policy, timed[policy], scores, speeds, objective, figures)
            yield replace(
                found,
                settled=policy == baseline or policy in settled,
                in_loop=any(row.in_loop for row in own),
                alike=are_alike(own, of[baseline]) and (shows_alone or not _is_of_one_process(found.gain)),
                believed=not contradicted or policy == baseline or _is_beyond_its_trial(policy, own),
                rows=sum(isinstance(row.outcome, Measurement) for row in own),
            )


def _is_beyond_its_trial(policy: Policy, own: Sequence[Row]) -> bool:
    """Returns True if more than a trial speaks of a policy: the loop, or without graphs a second process.

    The loop may not tell, since it waits for data or the loader failed: then the comparison has steps by themselves.
    """
    has_graphs = policy.cuda_graphs or policy.compile != "off"
    launches = {(row.run, row.launch) for row in own}
    return any(row.in_loop for row in own) or (not has_graphs and len(launches) >= PROCESSES)


def _by_policy(rows: Iterable[Row]) -> dict[Policy, list[Row]]:
    found: dict[Policy, list[Row]] = {}
    for row in rows:
        found.setdefault(row.policy, []).append(row)
    return found


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest run with measurements of a policy, its samples per second in it, and whether the loop was timed."""

    run: str
    samples_per_s: float
    in_loop: bool


def _newest_figures(rows: Sequence[Row]) -> _Newest:
    run = next(row.run for row in reversed(rows) if isinstance(row.outcome, Measurement))
    own = [row for row in rows if row.run == run]
    in_loop = any(row.in_loop for row in own)
    return _Newest(run, math.exp(statistics.median(_log_speeds(own, in_loop=in_loop))), in_loop)


def _log_speeds(rows: Iterable[Row], *, in_loop: bool) -> list[float]:
    """Returns the logarithms of the samples per second: of the user's loop, or of steps by themselves."""
    measured = (row.outcome for row in rows if row.in_loop == in_loop)
    return [math.log(outcome.samples_per_s) for outcome in measured if isinstance(outcome, Measurement)]


def _measured(
    policy: Policy,
    rows: Sequence[Row],
    scores: Estimates,
    speeds: Estimates,
    objective: Objective,
    baseline: _Newest,
) -> Contender:
    """Returns a policy's figures; times are those of the `baseline`'s newest run, and of the loop if that was timed."""
    blocks = [row.outcome for row in rows if isinstance(row.outcome, Measurement)]
    energies = [block.energy_j_per_sample for block in blocks if block.energy_j_per_sample is not None]
    speed, gain = _honest(speeds.to_baseline(policy)), scores.to_baseline(policy)
    if objective.name != "memory":
        gain = _honest(gain)
    share = speeds.time_share(policy)
    logs = _log_speeds((row for row in rows if row.run == baseline.run), in_loop=baseline.in_loop)
    if not logs and speed is not None:
        logs = [math.log(baseline.samples_per_s * speed.value)]
    logs = logs or [math.log(block.samples_per_s) for block in blocks]
    samples_per_s = math.exp(statistics.median(logs))
    step_ms = 1000 * blocks[0].samples_per_step / samples_per_s
    return Contender(
        policy=policy,
        samples_per_s=samples_per_s,
        step_ms=step_ms,
        step_ms_ci95=(step_ms * (1 - share), step_ms * (1 + share)) if share < 1 else None,
        peak_memory_mib=max(block.peak_allocated_mib for block in blocks),
        energy_j_per_sample=statistics.median(energies) if energies else None,
        vs_baseline=speed,
        gain=gain,
        chance=0.0 if gain is None else gain.chance_above(1 + objective.least_gain),
        fast_enough=_fast_enough(speed, objective),
        disturbed=all(row.is_disturbed for row in rows),
    )


def _honest(ratio: Ratio | None) -> Ratio | None:
    """Returns the ratio; one of two policies that one process alone has measured reaches 1."""
    return ratio.of_one_process if ratio is not None and _is_of_one_process(ratio) else ratio


def _is_of_one_process(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.launches < PROCESSES and ratio.deviation > 0


def _fast_enough(speed: Ratio | None, objective: Objective) -> float:
    """Returns the probability that a policy has the speed that the objective needs."""
    if speed is None or not objective.needs_speed:
        return 1.0
    return speed.chance_above(max(objective.least_speed - KNOWN_TO, NEGLIGIBLE))
