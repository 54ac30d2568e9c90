"""The next job of a run, or its answer, from all that is known. Pure; the one place that decides it.

The phases stand in order; the first that has a job has the word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.setting_effects import ordered_as, whole_step_of
from amptune.policy.settings import Policy
from amptune.search.durations import Durations
from amptune.search.gate.judgement import is_own_fault
from amptune.search.job import Answer, Job
from amptune.search.refinements import modules_to_time, refinements_of
from amptune.search.sampler.proposals import Proposal, optimistic, proposals
from amptune.search.space.knobs import FLOAT8
from amptune.search.state import State
from amptune.search.table.contenders import PROCESSES
from amptune.search.table.next_rows import next_round
from amptune.search.table.trial import Trial

__all__ = ["next_job"]

# The modes that compile in the background; the others time kernels, which would disturb and be disturbed.
BEHIND = ("reduce-overhead", "default", "step", "blocks")
# A proposal that promises less in a second of its time is not worth doing: 1 % of speed in a minute.
WORTHWHILE = 0.01 / 60
# Where blocks of one policy differ by this much, a further trial tells nothing before leader and baseline took turns.
NOISY = 0.1
# So many trials come before that all the same.
FEWEST_TRIALS = 4
# Finding the largest batch takes at most this share of the time: nothing else is measured meanwhile.
BATCH_SIZES_SHARE = 1 / 8
# A graph of what is so many times behind without one gives its place to another.
LOST = 1.5
# Compiling is given up after this many compiled policies failed and none ran.
COMPILE_ATTEMPTS = 2
# The device memory that a compiling process is expected to need, relative to the eager baseline: CUDA graphs have their
# own memory pool, and the process has its own CUDA context.
OVER_EAGER = 1.5
# So many graphs compile until one has come: more make all of them later, and nobody knows how fast the host is.
FIRST_GRAPHS = 2
# A judgement that is thought to take so many times what is left is not begun.
HOPEFUL = 3.0
# Seconds after the budget until which judging the winner may begin, and the share of the budget that judging its graph
# may take.
GRACE_S, JUDGED_GRAPH_SHARE = 5.0, 0.15
# A graph may be so much later than expected before it is looked at what else there is to do.
LATE_S = 10.0
# Less time than this is none.
MOMENT_S = 0.1


def next_job(state: State) -> Job | Answer:
    """Returns the first job that a phase has, or the answer."""
    at = Durations(state)
    return next((job for phase in PHASES if (job := phase(state, at)) is not None), None) or Answer(
        because=_why_nothing(state, at)
    )


def _largest_batch(state: State, _: Durations) -> Job | None:
    """The batch sizes, if asked for, before anything compiles beside that."""
    if state.sizes is not None:
        return None
    policy = next(iter(state.candidates.halves_alone), state.baseline)
    seconds = BATCH_SIZES_SHARE * state.left_s
    return Job(kind="batch size", policies=(policy,), seconds=seconds, limit_s=seconds)


def _graph(state: State, at: Durations) -> Job | None:
    """The likeliest graph, whenever one more can compile in the background and would come in time."""
    lost = tuple(one for one in state.graphs.begun if _is_lost(one, state))
    if len(state.graphs.known) - len(lost) >= min(_places(state), state.trials_left) or _has_failed(state):
        return None
    able = (one for one in _graphs_in_order(state) if state.is_free(one) and not _is_broken(one, state))
    in_time = [one for one in able if at.beside_s(one) + at.typical_s < state.left_s]
    if at.is_late and not lost:  # others would make it later still: only one that comes in time on any host
        in_time = [one for one in in_time if at.slow_compile_s(one) + at.typical_s < state.left_s]
    if in_time:
        return Job(kind="compile", policies=(in_time[0], *lost), seconds=0.0, limit_s=max(1.0, state.left_s))
    if at.is_late:
        return None
    proposal = _proposal(state, at, compiled=True)
    if proposal is None or proposal.policy.compile not in BEHIND or cannot_compile(state):
        return None
    seconds = at.beside_s(proposal.policy) + at.typical_s
    if seconds > state.left_s or proposal.gain < WORTHWHILE * seconds:
        return None
    return Job(kind="compile", policies=(proposal.policy,), seconds=0.0, limit_s=max(1.0, state.left_s))


def _baseline(state: State, at: Durations) -> Job | None:
    """The baseline, without which there is no answer; again if only former runs measured it."""
    if state.own_baseline is not None or state.baseline in state.cut:
        return None
    return Job(kind="trial", policies=(state.baseline,), seconds=at.typical_s, limit_s=state.left_s)


def _ready(state: State, at: Durations) -> Job | None:
    """A graph that is ready: it may use the time that is kept for the answer, but for one turn beside the baseline."""
    if not state.graphs.ready or state.trials_left <= 0 or _has_failed(state):
        return None
    policy, result = next(iter(state.graphs.ready.items()))
    compared_s = at.turn_s(state.baseline) + at.turn_s(policy)
    if isinstance(result, float) and at.typical_s + compared_s > state.left_s:
        return None
    return Job(kind="trial", policies=(policy,), seconds=at.typical_s, limit_s=state.left_s)


def _start(state: State, at: Durations) -> Job | None:
    """The space's starting points, in its order, unless what is known says that they are behind the leader.

    Where blocks differ much, leader and baseline take turns once the first few were measured.
    """
    if len(state.history.trials) >= FEWEST_TRIALS and _is_noisy(state, at):
        return None
    for policy in state.candidates.starts:
        if _is_in_background(policy, state) or not state.is_free(policy) or _is_broken(policy, state):
            continue
        if whole_step_of(policy) in state.scores:  # recorded passes are a part of it
            continue
        if policy in state.candidates.amp_recipes or not _is_behind(policy, state):
            job = _trial(policy, state, at)
            if job is not None:
                return job
    return None


def _soundness(state: State, at: Durations) -> Job | None:
    """The judgement of the precision that leads, and a cure for one that fails: what is built on it rests on that."""
    if state.judgements.failure is not None:
        return None
    for policy in (state.leader, *_broken_recipes(state)):
        recipe = next((one for one in state.candidates.halves_alone if one.precision == policy.precision), policy)
        ordered = ordered_as(recipe, policy)  # sums are taken as the leader takes them, since the answer may
        unjudged = recipe if state.judgements.rejection_of(ordered) else ordered
        seconds = at.judge_s(unjudged)
        if state.judgements.is_open(unjudged) and seconds <= at.spare_s + at.judge_s(state.leader):
            return Job(kind="numerics", policies=(unjudged,), seconds=seconds, limit_s=state.left_s)
    for recipe in state.candidates.halves_alone:
        if recipe.precision in state.uncured and state.judgements.rejection_of(recipe) and at.spare_s > MOMENT_S:
            seconds = min(at.cure_s, at.spare_s / 2)
            return Job(kind="cure", policies=(recipe,), seconds=seconds, limit_s=at.spare_s / 2)
    return None


def _module_times(state: State, at: Durations) -> Job | None:
    """The times of the modules by themselves, if they may show what the leader gains by FP32 for some of them."""
    policy = modules_to_time(state)
    if policy is None or at.sense_s + at.typical_s > at.spare_s:
        return None
    return Job(kind="modules", policies=(policy,), seconds=at.sense_s, limit_s=at.spare_s)


def _refinement(state: State, at: Durations) -> Job | None:
    """Refinements of the leader, as the leader runs, that the modules' times promise."""
    eager = (one for one in refinements_of(state) if not _is_in_background(one, state))
    able = (one for one in eager if state.is_free(one) and not _is_behind(one, state))
    return next((job for one in able if (job := _trial(one, state, at)) is not None), None)


def _proposed(state: State, at: Durations) -> Job | None:
    """The trial that the sampler proposes, while it is worth its time; none where blocks differ too much to tell."""
    if state.trials_left <= len(state.graphs.known) or at.typical_s > at.spare_s:
        return None
    if _has_failed(state) or _is_noisy(state, at):
        return None
    if state.request.sampler is not None and state.free_sampler:
        return Job(kind="trial", seconds=at.typical_s, limit_s=at.spare_s)
    proposal = _proposal(state, at, compiled=False)
    if proposal is None or proposal.gain < WORTHWHILE * at.trial_s(proposal.policy):
        return None
    return _trial(proposal.policy, state, at)


def _plain_loop(state: State, at: Durations) -> Job | None:
    """The leader's recorded passes alone: what a loop gets that does not make the call, told beside the answer."""
    plain = replace(state.leader, cuda_graphs=True) if state.leader.cuda_graphs == "step" else None
    if plain is None or not state.is_free(plain) or _is_broken(plain, state) or _is_in_background(plain, state):
        return None
    return _trial(plain, state, at)


def _wait(state: State, at: Durations) -> Job | None:
    """Waiting for a graph that comes in time, when there is nothing better to do."""
    if not state.graphs.begun or at.spare_s <= MOMENT_S or state.trials_left <= 0 or _has_failed(state):
        return None
    expected_s = min(map(at.remaining_s, state.graphs.begun))
    if expected_s > at.spare_s:
        return None
    seconds = max(0.0, expected_s)
    return Job(kind="wait", seconds=seconds, limit_s=min(at.spare_s, seconds + LATE_S))


def _round(state: State, at: Durations) -> Job | None:
    """The round of the comparison that tells most; its leader is judged before."""
    left_s = state.left_s - at.loaders_s
    is_over = state.rounds.is_over or left_s < MOMENT_S or _has_failed(state)
    verdict = None if is_over else state.verdict
    if verdict is None:
        return None
    leader = None if verdict.leader is None else verdict.leader.policy
    if leader is not None and state.judgements.is_open(leader) and at.judge_s(leader) < state.left_s + GRACE_S:
        return Job(kind="numerics", policies=(leader,), seconds=at.judge_s(leader), limit_s=state.left_s)
    recipes = (one for one in verdict.contenders if one.policy in state.candidates.amp_recipes and not one.failure)
    chosen = next_round(
        verdict,
        state.bar,
        beside=[one.policy for one in recipes][:1],
        running=state.running,
        seconds=at.round_s,
        left_s=left_s,
    )
    if chosen is None:
        return None
    # where time or the host allow little, two that take turns often tell more than many that take one
    alone = not chosen.fresh or (state.block_deviation > NOISY and verdict.confidence != "confirmed")
    policies = chosen.policies[:2] if alone else chosen.policies
    seconds = at.round_s(policies, chosen.fresh)
    return Job(kind="comparison", policies=policies, seconds=seconds, limit_s=left_s, fresh=chosen.fresh)


def _loader(state: State, at: Durations) -> Job | None:
    """Settings of the loader under the winner, if the loop waits for it: no faster step wins that time back."""
    seconds = min(at.loaders_s, state.left_s)
    if state.verdict is None or seconds <= at.loaders_s / 2:  # what is set aside was spent
        return None
    return Job(kind="loader", policies=(state.verdict.winner.policy,), seconds=seconds, limit_s=seconds)


def _winner(state: State, at: Durations) -> Job | None:
    """The judgement of the winner, also shortly beyond the budget, then that of its graph if there is time."""
    verdict = state.verdict
    if verdict is None or state.judgements.failure is not None or state.left_s <= -GRACE_S:
        return None
    winner, limit_s = verdict.winner.policy, state.left_s + GRACE_S
    if state.judgements.is_open(winner):  # one that is cut short tells nothing, and costs its time
        seconds = at.judge_s(winner)
        has_time = seconds < HOPEFUL * limit_s
        return Job(kind="numerics", policies=(winner,), seconds=seconds, limit_s=limit_s) if has_time else None
    seconds = at.judge_graph_s(winner)
    longest_s = min(limit_s, JUDGED_GRAPH_SHARE * state.request.budget.seconds)
    if state.judgements.is_graph_open(winner) and seconds < longest_s:
        return Job(kind="graph", policies=(winner,), seconds=seconds, limit_s=longest_s)
    return None


# What a run does, in this order.
PHASES: tuple[Callable[[State, Durations], Job | None], ...] = (
    _largest_batch,
    _graph,
    _baseline,
    _ready,
    _start,
    _soundness,
    _module_times,
    _refinement,
    _proposed,
    _plain_loop,
    _wait,
    _round,
    _loader,
    _winner,
)


def _trial(policy: Policy, state: State, at: Durations) -> Job | None:
    """Returns the trial of a policy, if there is time for it, and it is allowed beside the graphs that will come."""
    seconds = at.trial_s(policy)
    if state.trials_left <= len(state.graphs.known) or _has_failed(state) or at.longest_s(policy) > at.spare_s:
        return None
    return Job(kind="trial", policies=(policy,), seconds=seconds, limit_s=at.spare_s)


def _graphs_in_order(state: State) -> Iterator[Policy]:
    """Yields what to compile: the leading precision in each mode, then the second one; before, the starting points."""
    if state.request.objective.name == "memory" or cannot_compile(state):  # graphs need more memory
        return
    starts = [one for one in state.candidates.starts if one.compile in BEHIND]
    modes = dict.fromkeys(one.compile for one in starts)
    best: dict[str, Policy] = {}
    for policy in sorted(state.scores, key=state.scores.__getitem__, reverse=True):
        best.setdefault(policy.precision, policy)
    leading = list(best.values())[:2] if len(best) > 1 else []
    found = [policy.compiled(mode) for policy in leading for mode in modes]
    if wide := state.candidates.in_words.get(FLOAT8, {}).get("wide", ()):
        found[1:1] = [replace(one, autocast="bf16", float8_modules=wide) for one in found[:1] if one.weights == "fp32"]
    able = (replace(one, cuda_graphs=False) if _cannot_record(one, state) else one for one in chain(found, starts))
    in_space = (one for one in able if one in state.history.catalog.points)
    yield from dict.fromkeys(chain(in_space, (one for one in refinements_of(state) if one.compile in BEHIND)))


def _is_lost(policy: Policy, state: State) -> bool:
    """Returns True if a graph that compiles runs what is far behind without one, as its memory format may make it."""
    eager = [score for one, score in state.scores.items() if one.compile == "off"]
    own = state.scores.get(replace(policy, compile="off", cuda_graphs=False))
    return own is not None and LOST * own < max(eager)


def _is_in_background(policy: Policy, state: State) -> bool:
    return policy.compile in BEHIND and state.graphs.at_once > 0


def _places(state: State) -> int:
    """Returns how many graphs the CPU cores and the device's memory are enough for."""
    trial, run = state.history.latest.get(state.baseline), state.request.run
    has_compiled = any(one.run == run and one.policy.compile in BEHIND for one in state.history.trials)
    if trial is None or not isinstance(trial.outcome, Measurement) or not has_compiled:
        return min(state.graphs.at_once, FIRST_GRAPHS)
    peak_mib = max(1.0, trial.outcome.peak_reserved_mib)
    in_memory = (state.prepared.memory_mib or math.inf) / (OVER_EAGER * peak_mib) - 1
    return int(min(state.graphs.at_once, max(1.0, in_memory)))


def _has_failed(state: State) -> bool:
    """Returns True if the baseline failed, has no figure, or took longer than the budget."""
    trial = state.history.latest.get(state.baseline)
    return state.baseline in state.cut or (trial is not None and state.history.yardstick.score(trial.outcome) is None)


def cannot_compile(state: State) -> bool:
    """Returns True if all compiled policies failed, of two modes at least: CUDA graphs alone may be the cause."""
    compiled = [trial for trial in state.history.trials if trial.policy.compile != "off"]
    broken = [one for one in compiled if isinstance(one.outcome, Failure) and one.outcome.kind != "oom"]
    enough = len({one.policy.compile for one in broken}) > 1
    return enough and len(broken) == len(compiled) >= COMPILE_ATTEMPTS


def _is_broken(policy: Policy, state: State) -> bool:
    """Returns True if its graphs cannot be made here: all that were compiled or recorded alike were not supported."""
    alike = [one for one in state.history.trials if one.policy.compile == policy.compile != "off"]
    return _are_unsupported(alike) or _cannot_record(policy, state)


def _cannot_record(policy: Policy, state: State) -> bool:
    recorded = [one for one in state.history.trials if one.policy.cuda_graphs == policy.cuda_graphs is not False]
    return _are_unsupported(recorded)


def _are_unsupported(trials: Sequence[Trial]) -> bool:
    fails = (isinstance(one.outcome, Failure) and one.outcome.kind == "unsupported" for one in trials)
    return bool(trials) and all(fails)


def _broken_recipes(state: State) -> Iterator[Policy]:
    """Yields the plain policies that raised what FP32 does not."""
    for recipe in state.candidates.halves_alone:
        trial = state.history.latest.get(recipe)
        if trial is not None and isinstance(trial.outcome, Failure) and is_own_fault(recipe, trial.outcome):
            yield recipe


def _proposal(state: State, at: Durations, *, compiled: bool) -> Proposal | None:
    """Returns what the own sampler proposes of the policies that compile in the background, or of all others."""
    catalog = state.history.catalog
    parts = {one for one in catalog.policies if whole_step_of(one) in state.scores}
    others = parts | {one for one in catalog.policies if _is_in_background(one, state) != compiled}
    besides = others | state.graphs.known | state.cut
    running = [*state.elsewhere, *state.graphs.known]
    found = proposals(state.history, besides, state.request.seed, seconds=at.trial_s, running=running)
    best = state.scores.get(state.leader)
    return None if found is None or (best is not None and found.optimistic < math.log(best)) else found


def _is_behind(policy: Policy, state: State) -> bool:
    """Returns True if not even an optimistic estimate of a policy reaches the leader."""
    estimate, best = optimistic(state.history, policy), state.scores.get(state.leader)
    return estimate is not None and best is not None and estimate < math.log(best)


def _is_noisy(state: State, at: Durations) -> bool:
    """Returns True until leader and baseline took turns in enough processes, where blocks of a policy differ much.

    If no round tells anything, as nothing may be ahead of the baseline, trials are all there is.
    """
    is_open = state.rounds.count < PROCESSES and state.block_deviation > NOISY
    return is_open and _round(state, at) is not None


def _why_nothing(state: State, at: Durations) -> str:
    """Returns in words why no more policies are measured."""
    trial = state.history.latest.get(state.baseline)
    if _has_failed(state):
        if state.baseline in state.cut:
            return "the baseline takes longer than the budget"
        fails = trial is not None and isinstance(trial.outcome, Failure)
        return "the baseline itself fails" if fails else "the baseline has no figure"
    if state.trials_left <= 0:
        return f"all trials that are allowed are done: {state.request.budget.trials}"
    if at.typical_s > at.spare_s:
        return "the budget for searching is spent"
    if all(one in state.history.latest for one in state.history.catalog.policies):
        return "every policy of the space is measured"
    return "nothing that is left to try promises to be better"
