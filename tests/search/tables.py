"""Tables made up for tests: single rows, rows in turn, and tables drawn from a world that is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from measurements import took

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.table.effects import Machine
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = ["BF16", "BF16_LAST", "BLOCK_S", "FP16", "Block", "Drawn", "block", "decided", "equals", "in_turn", "row"]

BF16, FP16, BF16_LAST = amp_recipe("bf16"), amp_recipe("fp16"), amp_recipe("bf16", memory_format="channels_last")
# Between the ends of two blocks.
BLOCK_S = 2.0
DRIFT_S = 300.0
# Degrees of freedom of the noise of blocks.
TAILS = 3.0
# The run that asks what the ratio was, and its process.
LATER = "later"
# What makes rows differ, in step spreads. The model knows fewer effects: `host` is what a sitting does to all policies,
# `drift` what passes within minutes.
WORLDS = {
    "cuda": {"block": 1.0, "process": 0.8, "sitting": 0.8, "host": 1.0, "drift": 0.5},
    "cpu": {"block": 1.0, "process": 1.0, "sitting": 0.6, "host": 0.3, "drift": 0.5},
}

# A number is the time of a block's steps in ms.
Block = Measurement | Failure | float


def block(step_ms: float = 10.0, spread: float = 0.0, **more: Any) -> Measurement:
    """Five steps whose median is `step_ms`, and whose robust standard deviation is `spread`, relative to it."""
    off = spread / 1.4826
    return replace(took(step_ms, **more), step_ms=tuple(step_ms * (1 + n * off) for n in (0, 2, -1, 1, -2)))


def row(
    policy: Policy, outcome: Block, *, run: str = "run", launch: str = "0", moment_s: float = 0.0, spread: float = 0.0
) -> Row:
    made = block(outcome, spread) if isinstance(outcome, int | float) else outcome
    return Row(policy=policy, outcome=made, run=run, launch=launch, moment_s=moment_s)


def in_turn(
    columns: Mapping[Policy, Sequence[Block]],
    *,
    run: str = "run",
    per_launch: int = 1,
    start_s: float = 0.0,
    spread: float = 0.0,
) -> list[Row]:
    """Rounds in which every policy is measured once, all started anew every `per_launch` of them."""
    rows: list[Row] = []
    for i in range(len(next(iter(columns.values())))):
        for policy, blocks in columns.items():
            moment_s, launch = start_s + BLOCK_S * len(rows), f"comparison {i // per_launch}"
            rows.append(row(policy, blocks[i], run=run, launch=launch, moment_s=moment_s, spread=spread))
    return rows


def decided(
    rows: Sequence[Row],
    machine: Machine,
    objective: Objective = THROUGHPUT,
    bar: Callable[[Policy], str | None] = lambda _: None,
) -> Verdict:
    """The verdict on the rows, beside stock PyTorch; there is one."""
    verdict = verdict_of(rows, STOCK, machine, objective, bar)
    assert verdict is not None
    return verdict


def equals(count: int) -> list[Policy]:
    """Stock PyTorch, and policies as simple."""
    return [STOCK, *(replace(STOCK, batch_size=n) for n in range(1, count))]


@dataclass
class Drawn:
    """Rows drawn from a world: every effect is random, and as large as on such machines as a rule.

    `times_ms` are the true times of the policies, `spread` how much the steps of one block differ.
    With `wide` each effect is up to so many times smaller or larger.
    """

    machine: Machine
    times_ms: Mapping[Policy, float]
    spread: float
    seed: int = 0
    wide: float = 1.0
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._effects: dict[tuple[object, ...], float] = {}
        self._drift: dict[str, tuple[float, float]] = {}
        sizes = WORLDS[self.machine.device].items()
        self._sizes = {name: size * math.pow(self.wide, self._random.uniform(-1, 1)) for name, size in sizes}

    def rounds(self, count: int, *, run: str = "run", launch: str = "0", start_s: float = 0.0) -> None:
        """Measures every policy `count` times in turn. Moments of a run do not go back."""
        for i in range(count * len(self.times_ms)):
            policy, moment_s = list(self.times_ms)[i % len(self.times_ms)], start_s + BLOCK_S * i
            noise = self._size("block") * self._outlying() + self._drifted(run, moment_s)
            log = self._lasting(policy, run, launch, int(moment_s // 600)) + self.spread * noise + self._level(run)
            ms = self.times_ms[policy] * math.exp(log)
            self.rows.append(row(policy, ms, run=run, launch=launch, moment_s=moment_s, spread=self.spread))

    def later(self, policy: Policy, other: Policy) -> float:
        """How many times `policy` is as fast as the other in a later sitting, in fresh processes, without noise."""
        log, other_log = (self._lasting(one, LATER, LATER, 0) for one in (policy, other))
        return self.times_ms[other] / self.times_ms[policy] * math.exp(other_log - log)

    def _lasting(self, policy: Policy, run: str, launch: str, sitting: int) -> float:
        """What does not pass within a sitting."""
        own = self._effect("process", run, launch, policy) + self._effect("sitting", run, sitting, policy)
        return self.spread * (own + self._effect("host", run, sitting))

    def _level(self, run: str) -> float:
        """All policies are slower in one run than in another by any factor."""
        return 3.0 * sum(map(ord, run)) % 7

    def _effect(self, name: str, *where: object) -> float:
        if (name, *where) not in self._effects:
            self._effects[name, *where] = self._random.gauss(0, 1) * self._size(name)
        return self._effects[name, *where]

    def _size(self, name: str) -> float:
        return self._sizes[name]

    def _outlying(self) -> float:
        """Noise with outliers: Student's t."""
        squares = self._random.gammavariate(TAILS / 2, 2)
        return self._random.gauss(0, 1) / math.sqrt(squares / TAILS)

    def _drifted(self, run: str, moment_s: float) -> float:
        """What is left of the drift before, and what is new."""
        before_s, before = self._drift.get(run, (-math.inf, 0.0))
        kept = math.exp(-(moment_s - before_s) / DRIFT_S)
        now = kept * before + math.sqrt(1 - kept**2) * self._size("drift") * self._random.gauss(0, 1)
        self._drift[run] = moment_s, now
        return now
