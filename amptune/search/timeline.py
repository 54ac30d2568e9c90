"""The timeline: which job a run did when, in plain data, and what it knew then: each choice can be made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from amptune.measure.results.outcome import Failure, outcome_from_dict, outcome_to_dict
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import Policy
from amptune.search.gate.judgements import Judgements
from amptune.search.job import Job
from amptune.search.plan.budget import Budget
from amptune.search.refinements import candidates_of
from amptune.search.sampler.catalog import Catalog
from amptune.search.state import Graphs, Rounds, State

__all__ = ["Timeline", "state_at"]

# What is known besides by its own name.
_BY_NAME = ("spent_s", "judged_s", "free_sampler")


@dataclass
class Timeline:
    """The jobs of a run by the clock of its budget, in order; `started` is called before each."""

    budget: Budget
    started: Callable[[Job], None] = lambda _: None
    entries: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def noting(self, job: Job, state: State | None = None) -> Iterator[None]:
        """Notes a job that is done meanwhile, also if it is interrupted, and the state that it was chosen from."""
        began_s = self.budget.spent_s
        self.started(job)
        try:
            yield
        finally:
            seconds = self.budget.spent_s - began_s
            entry = {"at_s": round(began_s, 4), "seconds": round(seconds, 4), **job.as_dict()}
            self.entries.append(entry | ({} if state is None else {"known": _known(state)}))


def _known(state: State) -> dict[str, Any]:
    """Returns what a state knows beside the tables of its study: of these, how much there was."""
    graphs, rounds = state.graphs, state.rounds
    return {
        **{name: getattr(state, name) for name in _BY_NAME},
        "trials": len(state.history.trials),
        "rows": len(state.rows),
        "judgements": len(state.judgements.found),
        "sensed": list(state.sensed),
        "sizes": state.sizes is not None,
        "uncured": sorted(state.uncured),
        "guarded": sorted(state.safeguards),
        "begun": [[policy_to_dict(policy), at_s] for policy, at_s in graphs.begun.items()],
        "ready": [[policy_to_dict(one), _result_to_plain(result)] for one, result in graphs.ready.items()],
        "cut": [policy_to_dict(policy) for policy in state.cut],
        "elsewhere": [policy_to_dict(policy) for policy in state.elsewhere],
        "rounds": [rounds.count, rounds.start_s, rounds.is_over],
        "running": [[policy_to_dict(policy), launch] for policy, launch in rounds.running.items()],
        "costs_s": [[policy_to_dict(policy), seconds] for policy, seconds in rounds.costs_s.items()],
    }


def state_at(last: State, entry: Mapping[str, Any]) -> State:
    """Returns the state that a job of a run was chosen from, from an entry of its timeline and its `last` state."""
    known = entry["known"]
    found = dict(list(last.judgements.found.items())[: known["judgements"]])
    count, start_s, is_over = known["rounds"]
    state = last.but(
        **{name: known[name] for name in _BY_NAME},
        history=replace(last.history, trials=tuple(last.history.trials[: known["trials"]])),
        rows=last.rows[: known["rows"]],
        judgements=Judgements(last.judgements.baseline, found),
        sensed={name: last.sensed[name] for name in known["sensed"]},
        sizes=last.sizes if known["sizes"] else None,
        uncured=frozenset(known["uncured"]),
        safeguards={name: rules for name, rules in last.safeguards.items() if name in known["guarded"]},
        graphs=Graphs(
            at_once=last.graphs.at_once,
            begun=_by_policy(known["begun"]),
            ready={one: _result_from_plain(result) for one, result in _by_policy(known["ready"]).items()},
        ),
        cut=frozenset(map(policy_from_dict, known["cut"])),
        elsewhere=frozenset(map(policy_from_dict, known["elsewhere"])),
        rounds=Rounds(
            count=count,
            start_s=start_s,
            is_over=is_over,
            running=_by_policy(known["running"]),
            costs_s=_by_policy(known["costs_s"]),
            loader_failure=last.rounds.loader_failure,
        ),
    )
    candidates = candidates_of(state)
    if candidates == state.candidates:
        return state
    catalog = Catalog(candidates.space, candidates.policy_of)
    return state.but(candidates=candidates, history=replace(state.history, catalog=catalog))


def _by_policy(pairs: list[list[Any]]) -> dict[Policy, Any]:
    return {policy_from_dict(policy): value for policy, value in pairs}


def _result_to_plain(result: float | Failure) -> Any:
    return outcome_to_dict(result) if isinstance(result, Failure) else result


def _result_from_plain(plain: Any) -> Any:
    return outcome_from_dict(plain) if isinstance(plain, dict) else plain
