"""Comparisons of the programs here: policies measured in turn as amptune does it, and their rows in files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import Failure, Outcome
from amptune.measure.results.subject import Prepared
from amptune.policy.settings import Policy
from amptune.search.events import Observer
from amptune.search.narrowing import Narrowing
from amptune.search.plan.budget import Budget
from amptune.search.table.effects import Machine, machine_of
from amptune.search.table.row import Row
from amptune.search.table.verdict import verdict_of

# Rows in files that have no time: a block and its warm-up take about this long.
BLOCK_S = 1.0

Block = tuple[Policy, Outcome]


def measured_in_turn(
    evaluator: Evaluator,
    prepared: Prepared,
    policies: Sequence[Policy],
    budget: Budget,
    observer: Observer,
    *,
    tried: Iterable[Block] = (),
    seed: int = 0,
) -> list[Row]:
    """Returns rows of the policies, the first of which is the baseline: one of each, then what tells most.

    A policy that failed when it was `tried` before enters with that failure.
    """
    failed = [(policy, outcome) for policy, outcome in tried if policy in policies and isinstance(outcome, Failure)]
    rows = rows_of([("tried", failed)])
    baseline, machine = policies[0], machine_of(prepared.hardware.device)
    narrowing = Narrowing(
        evaluator=evaluator,
        budget=budget,
        observer=observer,
        run="",
        verdict=lambda: verdict_of(rows, baseline, machine),
        keep=rows.append,
        start_s=prepared.start_s,
        seed=seed,
    )
    out = {row.policy for row in rows}
    narrowing.round_of([policy for policy in policies if policy not in out])
    while (step := narrowing.wants()) is not None:
        step.act(step.seconds)
    return rows


def compile_beside(evaluator: Evaluator, policies: Sequence[Policy], limit_s: float) -> None:
    """Compiles these policies beside one another, each in a process of its own, where it is measured later."""
    budget = Budget(seconds=limit_s)
    for policy in policies:
        evaluator.begin_compiling(policy, limit_s)
    while evaluator.compiling and budget.left_s > 0:
        evaluator.compiled(budget.left_s)


def rounds_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yields the rows in rounds: a policy that comes again, or another launch, begins one."""
    found: list[Row] = []
    for row in rows:
        if found and (row.launch != found[0].launch or any(row.policy == one.policy for one in found)):
            yield found
            found = []
        found.append(row)
    if found:
        yield found


def launches_of(rows: Sequence[Row]) -> list[str]:
    """Returns the names of the launches, in their order."""
    return list(dict.fromkeys(row.launch for row in rows))


def effects_on(hardware: str) -> Machine:
    """Returns the priors of a machine that a file names."""
    return machine_of("cuda" if "NVIDIA" in hardware else "cpu")


def rows_of(rounds: Iterable[tuple[object, Iterable[Block]]], began_s: float = 0.0) -> list[Row]:
    """Returns rounds that a file holds, each with its launch, as rows; `BLOCK_S` stands for times that it lacks."""
    blocks = ((policy, outcome, str(launch)) for launch, of_round in rounds for policy, outcome in of_round)
    return [
        Row(policy=policy, outcome=outcome, run="", launch=launch, moment_s=began_s + BLOCK_S * number)
        for number, (policy, outcome, launch) in enumerate(blocks)
    ]
