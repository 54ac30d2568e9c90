"""What a search does about FP32 islands, the products that a model itself keeps out of autocast: it tries TF32."""

from __future__ import annotations

from dataclasses import asdict, replace

from amptune.hardware.machine import Hardware
from amptune.measure.breakdown.module_times import LISTED, MOST, NAMED, called
from amptune.measure.results.half_effects import Island, Sensitivity
from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import is_in
from amptune.policy.settings import Policy
from amptune.search.space.knobs import Space

__all__ = ["islands_finding", "islands_refinement"]

# Islands that take less of a step are not told of, and TF32 is not tried if it saves less.
LEAST_SHARE = 0.02


def islands_refinement(
    leader: Policy, sensed: Sensitivity, space: Space, hardware: Hardware, *, step_ms: float | None = None
) -> Policy | None:
    """Returns the leader with TF32 for the FP32 products that autocast leaves; None if that cannot pay or is no choice.

    `step_ms` is the leader's own step with the batch that `sensed` was measured with, in which the islands take a
    larger share than in an eager one if it is compiled or recorded. Without it, the eager step counts.
    """
    can = hardware.gpu is not None and hardware.gpu.tf32 and is_in("tf32", space.choices("fp32_math"))
    if not can or leader.autocast == "off" or leader.fp32_math == "tf32":
        return None
    saved = [(island, island.ms - island.tf32_ms) for island in sensed.islands if island.tf32_ms is not None]
    if step_ms is None:
        share = sum(island.share * ms / island.ms for island, ms in saved)
    else:
        share = sum(ms for _, ms in saved) / step_ms
    return replace(leader, fp32_math="tf32") if share >= LEAST_SHARE else None


def islands_finding(sensed: Sensitivity) -> Finding | None:
    """Returns the finding `fp32-islands`; None if FP32 products take too little of a step under autocast."""
    islands = sorted(sensed.islands, key=lambda island: -island.ms)
    share, ms = sum(island.share for island in islands), sum(island.ms for island in islands)
    if share < LEAST_SHARE:
        return None
    tf32_ms = None if any(one.tf32_ms is None for one in islands) else sum(one.tf32_ms or 0.0 for one in islands)
    first = islands[0]
    remedy = (
        "they are faster in half precision, if the code there lets autocast in"
        if tf32_ms is None
        else f"they take {ms:.3g} ms, and {tf32_ms:.3g} ms with TF32 (fp32_math: tf32)"
    )
    return Finding(
        code="fp32-islands",
        message=f"{share:.0%} of a step under autocast are FP32 products, which autocast does not reach, "
        f"{_places(islands)}; {remedy}",
        module=first.module if first.module and first.ms >= MOST * ms else None,
        figures={"share": share, "ms": ms, "tf32_ms": tf32_ms, "islands": [asdict(one) for one in islands[:LISTED]]},
    )


def _places(islands: list[Island]) -> str:
    named = [called(one.module) + (f" ({one.where})" if one.where else "") for one in islands[:NAMED]]
    more = len(islands) - len(named)
    return f"in {', '.join(named)}" + (f" and {more} more place{'s' * (more > 1)}" if more else "")
