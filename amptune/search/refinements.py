"""Refinements of the leader, as it runs: other precisions for some modules, where the modules' times promise enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from amptune.policy.settings import Fp32Math, Policy
from amptune.search.space.candidates import Candidates, candidates_for
from amptune.search.space.exclusions import ladder_by_time
from amptune.search.space.islands import WORTH_TRYING, islands_refinement
from amptune.search.space.knobs import EXCLUSIONS, IN_HALF
from amptune.search.state import State

__all__ = ["candidates_of", "modules_to_time", "refinements_of", "sensed_as"]


# Half precision so many times behind an FP32 leader is not refined.
NEAR = 2.0


def sensed_as(state: State, memory_format: str) -> tuple[str, Policy]:
    """Returns the name and the policy that modules are timed under, for a memory format."""
    gpu, space = state.prepared.hardware.gpu, state.candidates.stored  # whatever numerics took out of it meanwhile
    math: Fp32Math = "tf32" if gpu is not None and gpu.tf32 and "tf32" in space.choices("fp32_math") else "stock"
    policy = Policy(fp32_math=math, memory_format=memory_format)  # type: ignore[arg-type]
    return f"{policy}, {' '.join(space.half_dtypes)}", policy


def candidates_of(state: State) -> Candidates:
    """Returns the candidates by what is known of the modules' times, batch sizes and safeguards."""
    layouts = map(str, state.candidates.space.choices("memory_format") or ("contiguous",))
    named = {layout: sensed_as(state, layout)[0] for layout in layouts}
    sensed = {layout: state.sensed[name] for layout, name in named.items() if name in state.sensed}
    ladder = ladder_by_time(state.prepared.subject, sensed) if sensed else None
    sizes = () if state.sizes is None else state.sizes.sizes
    return candidates_for(state.prepared, state.request.wanted, ladder, sizes).guarded(state.safeguards)


def modules_to_time(state: State) -> Policy | None:
    """Returns the policy to time the modules under; None if that is done, or no half precision is near the leader."""
    space, base = state.candidates.space, _base(state)
    if base is None or not state.prepared.subject.leaves:
        return None
    name, policy = sensed_as(state, base.memory_format)
    is_open = any(map(bool, (*space.choices(EXCLUSIONS), *space.choices(IN_HALF)))) or policy.fp32_math == "tf32"
    return policy if is_open and name not in state.sensed else None


def _base(state: State) -> Policy | None:
    """Returns the leader, or the best policy in half precision if the leader is in FP32 and not far ahead of that."""
    halves = {one: score for one, score in state.scores.items() if one.autocast != "off"}
    best = max(halves, key=halves.__getitem__, default=None)
    return None if best is None or state.scores[state.leader] > NEAR * halves[best] else best


def refinements_of(state: State) -> Iterator[Policy]:
    """Yields the leader with more modules in FP32, or in half, that saves enough by the modules' times; most first.

    If the leader is in FP32, it is the best policy in half precision, and what is saved has to put it ahead.
    """
    base, ladder, space = _base(state), state.candidates.ladder, state.candidates.space
    if base is None or (step_ms := state.step_ms(base)) is None:
        return
    ahead = state.scores[base] / state.scores[state.leader]
    least_ms = step_ms * (1 - (1 - WORTH_TRYING) * ahead)
    dtype, layout = base.autocast, base.memory_format
    depths = [int(one) for one in space.choices(EXCLUSIONS) if one]
    saves_ms = {depth: ladder.saves_ms(depth, dtype, layout) for depth in depths}
    name, timed_under = sensed_as(state, layout)
    needed = tuple(rule for rule in base.fp32_modules if rule.is_needed)
    if not any(not rule.is_needed for rule in base.fp32_modules):
        for depth in sorted(depths, key=lambda depth: -saves_ms[depth]):
            if saves_ms[depth] >= least_ms:
                rules = tuple(dict.fromkeys([*needed, *ladder.rules(depth, dtype, layout)]))
                yield replace(base, fp32_modules=rules, fp32_math=timed_under.fp32_math)
    may = not base.half_modules and True in space.choices(IN_HALF)
    half = ladder.half_beside(base.fp32_modules)
    if half and may and ladder.half_saves.get((dtype, layout), 0.0) >= least_ms:
        yield replace(base, half_modules=half)
    sensed = state.sensed.get(name)
    if sensed is not None and base == state.leader:
        is_own_batch = base.batch_size in (None, state.prepared.subject.batch_size)
        hardware, own_ms = state.prepared.hardware, step_ms if is_own_batch else None
        of_islands = islands_refinement(base, sensed, space, hardware, step_ms=own_ms)
        yield from () if of_islands is None else (of_islands,)
