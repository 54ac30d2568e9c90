"""Findings about torch.compile, from the trials: whether it pays, what failed, and what breaks its graphs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.setting_effects import graph_of
from amptune.policy.settings import Policy
from amptune.search.table.trial import Trial

__all__ = ["compile_findings"]

# A graph that starts faster than this came from the compiler's cache, so its compile time is unknown.
FROM_CACHE_S = 0.5

_Timed = tuple[Policy, Measurement]


def compile_findings(trials: Sequence[Trial], winner: Policy) -> Iterator[Finding]:
    """Yields how long compiling the winner took, after how many steps that pays, and what hindered compiling.

    Times are those of single trials. For a policy compiled before, they are start-up times with the graphs on disk.
    """
    measured = [(one.policy, one.outcome) for one in trials if isinstance(one.outcome, Measurement)]
    compiled = [one for one in measured if one[0].compile != "off"]
    eager = _fastest(one for one in measured if one[0].compile == "off")
    if eager is not None and winner.compile != "off":
        yield from _pays(compiled, winner, eager)
    tried = [one.outcome for one in trials if one.policy.compile != "off"]
    reasons = Counter(str(outcome) for outcome in tried if isinstance(outcome, Failure))
    if reasons:
        (why, _), failed = reasons.most_common(1)[0], reasons.total()
        message = f"{failed} of {len(tried)} compiled policies failed: {why}"
        yield Finding(code="compile-failed", message=message, figures={"failed": failed, "of": len(tried)})
    yield from _broken([one for policy, one in compiled if policy == winner] or [one for _, one in compiled])


def _pays(compiled: Sequence[_Timed], winner: Policy, eager: _Timed) -> Iterator[Finding]:
    mode, graph = winner.compile, graph_of(winner)
    alike = [one for one in compiled if one[0].compile == mode and graph_of(one[0]) == graph]
    own = _fastest([one for one in alike if one[0] == winner] or alike)
    seconds = max((outcome.startup_s for _, outcome in alike), default=0.0)
    if own is None or seconds < FROM_CACHE_S:
        return
    saved_ms = own[1].samples_per_step * 1000 / eager[1].samples_per_s - own[1].mean_ms
    if saved_ms > 0:
        steps = round(1000 * seconds / saved_ms)
        message = f"compiling took {seconds:.0f} s, which pays after {steps:,} steps against {eager[0]}"
        yield Finding(code="compile-pays", message=message, figures={"compile_s": seconds, "pays_after_steps": steps})


def _broken(measured: Sequence[Measurement]) -> Iterator[Finding]:
    """Yields graph breaks and recompilation."""
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


def _fastest(measured: Iterable[_Timed]) -> _Timed | None:
    return max(measured, key=lambda one: one[1].samples_per_s, default=None)
