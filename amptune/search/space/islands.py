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

__all__ = ["WORTH_TRYING", "islands_finding", "islands_refinement"]

# A refinement of the leader has to save this share of its step; islands that take less of a step are not told of.
WORTH_TRYING = 0.02


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
    return replace(leader, fp32_math="tf32") if share >= WORTH_TRYING else None


def islands_finding(sensed: Sensitivity) -> Finding | None:
    """Returns the finding `fp32-islands`; None if FP32 products take too little of a step under autocast."""
    islands = sorted(sensed.islands, key=lambda island: -island.ms)
    share, ms = sum(island.share for island in islands), sum(island.ms for island in islands)
    if share < WORTH_TRYING:
        return None
    in_tf32_ms = [one.tf32_ms for one in islands if one.tf32_ms is not None]
    tf32_ms = sum(in_tf32_ms) if in_tf32_ms else None
    first = islands[0]
    remedy = (
        "; half precision is faster, if the code there lets autocast in"
        if tf32_ms is None
        else f", or {tf32_ms:.3g} ms in TF32 (fp32_math: tf32)"
    )
    return Finding(
        code="fp32-islands",
        message=f"FP32 matrix products and convolutions take {share:.0%} of a step under autocast, "
        f"{_places(islands)}: {ms:.3g} ms{remedy}",
        module=first.module if first.module and first.ms >= MOST * ms else None,
        figures={"share": share, "ms": ms, "tf32_ms": tf32_ms, "islands": [asdict(one) for one in islands[:LISTED]]},
    )


def _places(islands: list[Island]) -> str:
    named = [called(one.module) + (f" ({one.where})" if one.where else "") for one in islands[:NAMED]]
    more = len(islands) - len(named)
    return f"in {', '.join(named)}" + (f" and {more} more place{'s' * (more > 1)}" if more else "")
