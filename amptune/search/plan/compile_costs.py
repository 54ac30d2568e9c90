"""The cost of torch.compile, and when it pays, from the trials. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.findings import Finding
from amptune.policy.setting_effects import graph_of
from amptune.policy.settings import AUTOTUNED_MODES, Policy
from amptune.search.table.trial import Trial

__all__ = [
    "AUTOTUNE_S",
    "COMPILE_S",
    "cold_s",
    "compile_findings",
    "compiled_s",
    "expected_compile_s",
    "judged_graph_s",
]

# Expected time to compile a graph while none was compiled here, without and with timing of its kernels. ResNet-50 on an
# H200 took 25 to 40 s (reports/h200/oracle); with timing it did not end in the 280 s that were left of that command.
COMPILE_S, AUTOTUNE_S = 30.0, 300.0

# Compile time by the model's number of leaf modules: VGG16 (53) took 10 to 17 s, BERT-base (105) 15 to 20, ResNet-50
# (155) 25 to 35, SE-ResNeXt50 (235) 40, DeepLabV3+ (334) 54 to 70, DenseNet-161 (489) 91 to 115, each compiled alone
# (on H200s of several hosts; amptune's trials and pytorch-autotune's logs in reports/h200/rivals). A graph twice as
# large takes more than twice as long.
FIXED_S, LEAF_S, PAIR_OF_LEAVES_S = 10.0, 0.1, 0.0002

# The gate compiles a graph anew for its batches, with dropout twice, in this many times the seconds of compiling for
# training (BERT-base on an H200: 31 s instead of 27).
GRAPH_TIMES = 1.3

# A graph that starts faster than this came from the compiler's cache, so its compile time is unknown.
FROM_CACHE_S = 0.5


def expected_compile_s(leaves: int) -> float:
    """Returns the expected compile time of a model with this many leaf modules."""
    return FIXED_S + LEAF_S * leaves + PAIR_OF_LEAVES_S * leaves**2


def cold_s(policy: Policy, tried: Mapping[Policy, Outcome]) -> float:
    """Returns the expected compile time of a policy's graph; 0 if the graph is in the cache by now."""
    if policy.compile == "off":
        return 0.0
    startup_s = {one: outcome.startup_s for one, outcome in tried.items() if isinstance(outcome, Measurement)}
    if any(_is_same_graph(one, policy) for one in startup_s):
        return 0.0
    alike = [seconds for one, seconds in startup_s.items() if one.compile == policy.compile]
    unknown = AUTOTUNE_S if policy.compile in AUTOTUNED_MODES else COMPILE_S
    return max(alike, default=unknown)


def compiled_s(policy: Policy, tried: Mapping[Policy, Outcome]) -> float:
    """Returns the measured compile time of a policy's graph, or else the expected one."""
    seen = [o.startup_s for one, o in tried.items() if isinstance(o, Measurement) and _is_same_graph(one, policy)]
    return max(seen, default=cold_s(policy, tried))


def judged_graph_s(policy: Policy, tried: Mapping[Policy, Outcome]) -> float:
    """Returns the seconds to judge a policy together with its compiled graph."""
    return GRAPH_TIMES * compiled_s(policy, tried)


def compile_findings(trials: Sequence[Trial], winner: Policy) -> Iterator[Finding]:
    """Yields how long compiling the winner took, after how many steps that pays, and what hindered compiling.

    Times are those of single trials. For a policy compiled before, they are start-up times with the graphs on disk.
    """
    compiled = [trial for trial in trials if trial.policy.compile != "off"]
    yield from _pays(trials, winner) if winner.compile != "off" else _not_faster(trials, compiled)
    yield from _failed(compiled)
    yield from _broken(compiled, winner)


def _pays(trials: Sequence[Trial], winner: Policy) -> Iterator[Finding]:
    graph = [trial for trial in trials if _is_same_graph(trial.policy, winner)]
    own = _fastest([trial for trial in graph if trial.policy == winner] or graph)
    eager = _fastest([trial for trial in trials if trial.policy.compile == "off"])
    seconds = max((outcome.startup_s for trial in graph if (outcome := _measured(trial)) is not None), default=0.0)
    measured = None if own is None else _measured(own)
    if measured is None or eager is None or seconds < FROM_CACHE_S:
        return
    saved_ms = measured.samples_per_step * 1000 / eager.samples_per_s - measured.mean_ms
    took = f"compiling took {seconds:.0f} s"
    if saved_ms <= 0:
        yield Finding(code="compile-costs", message=took, figures={"compile_s": seconds})
        return
    steps = round(1000 * seconds / saved_ms)
    yield Finding(
        code="compile-pays",
        message=f"{took}, which pays after {steps:,} steps against {eager.policy}",
        figures={"compile_s": seconds, "pays_after_steps": steps},
    )


def _is_same_graph(one: Policy, other: Policy) -> bool:
    return one.compile == other.compile and graph_of(one) == graph_of(other)


def _not_faster(trials: Sequence[Trial], compiled: Sequence[Trial]) -> Iterator[Finding]:
    best, eager = _fastest(compiled), _fastest([trial for trial in trials if trial.policy.compile == "off"])
    if best is None or eager is None:
        return
    ratio = best.samples_per_s / eager.samples_per_s
    yield Finding(
        code="compile-not-needed",
        message=f"torch.compile was tried; the fastest of it, {best.policy}, reached {ratio:.2f} times the speed of "
        f"{eager.policy} in single trials",
        figures={"ratio": ratio},
    )


def _failed(compiled: Sequence[Trial]) -> Iterator[Finding]:
    reasons = Counter(str(trial.outcome) for trial in compiled if isinstance(trial.outcome, Failure))
    if reasons:
        (why, _), count = reasons.most_common(1)[0], reasons.total()
        message = f"{count} of {len(compiled)} compiled policies failed: {why}"
        yield Finding(code="compile-failed", message=message, figures={"failed": count, "of": len(compiled)})


def _broken(compiled: Sequence[Trial], winner: Policy) -> Iterator[Finding]:
    """Reports graph breaks and recompilation in the winner's trials if it is compiled, else in any trial."""
    own = [trial for trial in compiled if trial.policy == winner] or compiled
    measured = [outcome for trial in own if (outcome := _measured(trial)) is not None]
    breaks = next((outcome.graph_breaks for outcome in measured if outcome.graph_breaks), ())
    if breaks:
        message = f"the model is not one graph to torch.compile, and each break costs: {'; '.join(breaks)}"
        yield Finding(code="graph-breaks", message=message)
    recompiled = max((outcome.recompiled for outcome in measured), default=0)
    if recompiled:
        message = (
            f"torch.compile compiled {recompiled} more graphs after the first steps: shapes or values in the model go "
            "on changing, and each new one is compiled again"
        )
        yield Finding(code="recompiles", message=message, figures={"graphs": recompiled})


def _fastest(trials: Sequence[Trial]) -> Trial | None:
    measured = [trial for trial in trials if isinstance(trial.outcome, Measurement)]
    return max(measured, key=lambda trial: trial.samples_per_s, default=None)


def _measured(trial: Trial) -> Measurement | None:
    return trial.outcome if isinstance(trial.outcome, Measurement) else None
