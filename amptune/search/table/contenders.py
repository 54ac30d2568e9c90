"""Contenders: the policies of the table, each with its figures. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import Policy
from amptune.search.table.model import Estimates
from amptune.search.table.objective import KNOWN_TO, NEGLIGIBLE, Objective
from amptune.search.table.ratio import LIKELY, Ratio
from amptune.search.table.row import Row, decisive, graphs_keep_coming, settled_in

__all__ = ["PROCESSES", "Contender", "contenders_of"]

# Launches differ more than blocks within one: nothing is confirmed by fewer processes.
PROCESSES = 2
# The names of figures: the speed, and what an objective saves.
_SPEED = "samples_per_s"
_USE = {"memory": "peak_memory_mib", "energy": "energy_j_per_sample"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One policy's figures in the table. They are None if it failed, or if all its trials ended early."""

    policy: Policy
    samples_per_s: float | None = None
    step_ms: float | None = None
    step_ms_ci95: tuple[float, float] | None = None
    peak_memory_mib: float | None = None
    energy_j_per_sample: float | None = None
    vs_baseline: Ratio | None = None
    """The ratio of its samples per second to the baseline's in a later sitting; `gain` is that of the objective."""

    gain: Ratio | None = None
    chance: float = 0.0
    """The probability that it is better than the baseline by the objective."""

    fast_enough: float = 1.0
    """The probability that it has the speed that the objective needs."""

    at_most: float | None = None
    """The largest share of the baseline's samples per second that it may reach, if its trials ended early."""

    disturbed: bool = False
    """True if all its rows were disturbed."""

    settled: bool = True
    """False if graphs were still compiled or recorded when its time was over."""

    in_loop: bool = False
    """True if it was timed in the user's loop."""

    believed: bool = True
    """False if it has its graphs' trial alone, and in the loop graphs kept coming under another policy."""

    rows: int = 0
    failure: Failure | None = None
    lost: str = ""
    """Why it did not win; empty for the winner."""

    @property
    def axes(self) -> dict[str, float]:
        """The figures that are known of what policies trade, to four digits."""
        names = (_SPEED, *_USE.values())
        figures = ((name, getattr(self, name)) for name in names)
        return {name: float(f"{value:.4g}") for name, value in figures if value is not None}

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
        """True if it is better than the baseline wherever its gain lies in its interval, and likely fast enough."""
        beyond = self.gain is not None and self.gain.low >= 1
        return beyond and self.chance >= LIKELY and not self.too_slow and self.believed

    @property
    def place(self) -> tuple[bool, bool, float, float]:
        """The sort key of contenders: the best first, then policies that are too slow, failures last."""
        return self.failure is not None, self.too_slow, -self.merit, -(self.samples_per_s or 0.0)


def contenders_of(
    rows: Sequence[Row], scores: Estimates, speeds: Estimates, objective: Objective
) -> Iterator[Contender]:
    """Yields each policy of the table with its figures: estimates by the objective, and of samples per second."""
    of, timed, settled = _by_policy(rows), _by_policy(decisive(rows)), settled_in(rows)
    baseline = scores.policies[scores.baseline]
    own_figures = _figures(timed[baseline])
    is_surprising = graphs_keep_coming(rows)
    for policy, own in of.items():
        count = sum(isinstance(row.outcome, Measurement) for row in own)
        failure = next((row.outcome for row in reversed(own) if isinstance(row.outcome, Failure)), None)
        if failure is not None and policy != baseline:
            yield Contender(policy=policy, failure=failure, rows=len(own))  # a policy that sometimes fails is useless
        elif policy in timed:
            has_graphs, in_loop = policy.cuda_graphs or policy.compile != "off", any(row.in_loop for row in own)
            yield replace(
                _measured(policy, timed[policy], scores, speeds, objective, own_figures),
                settled=policy == baseline or policy in settled,
                in_loop=in_loop,
                believed=in_loop or policy == baseline or not (has_graphs and is_surprising),
                rows=count,
            )
        elif any(row.is_bound for row in own):
            fastest = max(row.outcome.samples_per_s for row in own if isinstance(row.outcome, Measurement))
            yield Contender(policy=policy, at_most=fastest / own_figures[_SPEED], rows=count)


def _by_policy(rows: Iterable[Row]) -> dict[Policy, list[Row]]:
    found: dict[Policy, list[Row]] = {}
    for row in rows:
        found.setdefault(row.policy, []).append(row)
    return found


def _measured(
    policy: Policy,
    rows: Sequence[Row],
    scores: Estimates,
    speeds: Estimates,
    objective: Objective,
    baseline: Mapping[str, float],
) -> Contender:
    """Returns a policy's figures, such that those of two policies divide to the ratio that is told of them."""
    speed, gain = _honest(speeds.to_baseline(policy)), scores.to_baseline(policy)
    if objective.name != "memory":
        gain = _honest(gain)
    figures = _figures(rows)
    for name, ratio, power in ((_SPEED, speed, 1), (_USE.get(objective.name, ""), gain, -1)):
        if ratio is not None and 0 < ratio.value < math.inf and name in baseline:
            figures[name] = baseline[name] * ratio.value**power
    share = speeds.time_share(policy)
    samples = next(row.outcome.samples_per_step for row in rows if isinstance(row.outcome, Measurement))
    step_ms = 1000 * samples / figures[_SPEED]
    return Contender(
        policy=policy,
        samples_per_s=figures[_SPEED],
        step_ms=step_ms,
        step_ms_ci95=(step_ms * (1 - share), step_ms * (1 + share)) if share < 1 else None,
        peak_memory_mib=figures[_USE["memory"]],
        energy_j_per_sample=figures.get(_USE["energy"]),
        vs_baseline=speed,
        gain=gain,
        chance=0.0 if gain is None else gain.chance_above(1 + objective.least_gain),
        fast_enough=_fast_enough(speed, objective),
        disturbed=all(row.is_disturbed for row in rows),
    )


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    """Returns a policy's figures by their names: the speed of its newest run, in the loop if that was timed."""
    measured = [(row, row.outcome) for row in rows if isinstance(row.outcome, Measurement)]
    newest = [one for one in measured if one[0].run == measured[-1][0].run]
    in_loop = any(row.in_loop for row, _ in newest)
    speeds = [math.log(outcome.samples_per_s) for row, outcome in newest if row.in_loop == in_loop]
    joules = [one.energy_j_per_sample for _, one in measured if one.energy_j_per_sample is not None]
    peak_mib = max(one.peak_allocated_mib for _, one in measured)
    figures = {_SPEED: math.exp(statistics.median(speeds)), _USE["memory"]: peak_mib}
    return {**figures, _USE["energy"]: statistics.median(joules)} if joules else figures


def _honest(ratio: Ratio | None) -> Ratio | None:
    """Returns the ratio; the interval of what one process alone has measured reaches 1."""
    if ratio is None or ratio.launches >= PROCESSES or ratio.deviation == 0:
        return ratio
    return replace(ratio, low=min(ratio.low, 1.0), high=max(ratio.high, 1.0))


def _fast_enough(speed: Ratio | None, objective: Objective) -> float:
    """Returns the probability that a policy has the speed that the objective needs."""
    if speed is None or not objective.needs_speed:
        return 1.0
    return speed.chance_above(max(objective.least_speed - KNOWN_TO, NEGLIGIBLE))
