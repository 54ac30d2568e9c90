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


def sensed_as(state: State, memory_format: str) -> tuple[str, Policy]:
    """Returns the name and the policy that modules are timed under, for a memory format."""
    gpu, space = state.prepared.hardware.gpu, state.candidates.space
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
    """Returns the policy to time the modules under; None if that is done, or the leader is in FP32."""
    space, leader = state.candidates.space, state.leader
    name, policy = sensed_as(state, leader.memory_format)
    is_open = any(map(bool, (*space.choices(EXCLUSIONS), *space.choices(IN_HALF)))) or policy.fp32_math == "tf32"
    if leader.autocast == "off" or not is_open or not state.prepared.subject.leaves:
        return None
    return None if name in state.sensed else policy


def refinements_of(state: State) -> Iterator[Policy]:
    """Yields the leader with more modules in FP32, or in half, that saves enough by the modules' times; most first."""
    leader, ladder = state.leader, state.candidates.ladder
    step_ms = state.step_ms(leader)
    if leader.autocast == "off" or step_ms is None:
        return
    dtype, layout = leader.autocast, leader.memory_format
    depths = [int(one) for one in state.candidates.space.choices(EXCLUSIONS) if one]
    saves_ms = {depth: ladder.saves_ms(depth, dtype, layout) for depth in depths}
    name, timed_under = sensed_as(state, layout)
    needed = tuple(rule for rule in leader.fp32_modules if rule.is_needed)
    if not any(not rule.is_needed for rule in leader.fp32_modules):
        for depth in sorted(depths, key=lambda depth: -saves_ms[depth]):
            if saves_ms[depth] >= WORTH_TRYING * step_ms:
                rules = tuple(dict.fromkeys([*needed, *ladder.rules(depth, dtype, layout)]))
                yield replace(leader, fp32_modules=rules, fp32_math=timed_under.fp32_math)
    saved_ms = ladder.half_saves.get((dtype, layout), 0.0)
    may = not leader.half_modules and True in state.candidates.space.choices(IN_HALF)
    if ladder.half and may and saved_ms >= WORTH_TRYING * step_ms:
        yield replace(leader, half_modules=ladder.half)
    if (sensed := state.sensed.get(name)) is not None:
        is_own_batch = leader.batch_size in (None, state.prepared.subject.batch_size)
        of_islands = islands_refinement(
            leader,
            sensed,
            state.candidates.space,
            state.prepared.hardware,
            step_ms=step_ms if is_own_batch else None,
        )
        yield from () if of_islands is None else (of_islands,)
