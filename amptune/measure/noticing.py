"""Findings about the machine, made from the measurements of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from amptune.measure.outcome import Measurement, Outcome
from amptune.measure.readings import ALLOC_RETRIES, CLOCK_CODES, FOREIGN_PROCESS, POWER_CAP
from amptune.policy.findings import Finding

__all__ = ["noticed"]

_Codes = tuple[str, ...]

_WORDS = {
    "power-cap": "the GPU ran at its power cap",
    "hw-slowdown": "the GPU was slowed down (HW slowdown)",
    "sw-thermal": "the GPU was thermally throttled (SW thermal)",
    "hw-thermal": "the GPU was thermally throttled (HW thermal)",
    "power-brake": "the GPU was slowed down from outside (HW power brake)",
    "low-clock": "the GPU's clock was under 75 % of its highest, for no reason NVML gives",
    ALLOC_RETRIES: "the GPU's memory was so short that the allocator had to empty its cache",
    FOREIGN_PROCESS: "another process was on the GPU",
}


def noticed(outcomes: Iterable[Outcome]) -> tuple[Finding, ...]:
    """Returns a finding for each disturbance: `throttled`, `foreign-process`, `allocator-thrashing`, `unsteady`.

    The figures count blocks of steps; those of `unsteady` count trials. Trials abandoned early are left out.
    """
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement) and not outcome.abandoned]
    found = (
        _disturbed("throttled", CLOCK_CODES, measured),
        _disturbed("foreign-process", {FOREIGN_PROCESS}, measured),
        _disturbed("allocator-thrashing", {ALLOC_RETRIES}, measured),
        _unsteady(measured),
    )
    return tuple(finding for finding in found if finding is not None)


def _disturbed(code: str, causes: Collection[str], measured: Sequence[Measurement]) -> Finding | None:
    discarded = [_among(causes, why.split("+")) for m in measured for why in m.discarded]
    kept = [_among(causes, m.contaminated_by) for m in measured]
    if not any(discarded) and not any(kept):
        return None
    return Finding(
        code=code,
        message=_message(discarded, kept),
        figures={
            "discarded": sum(map(bool, discarded)),
            "kept": sum(map(bool, kept)),
            "of": len(discarded) + len(kept),
        },
    )


def _message(discarded: Sequence[_Codes], kept: Sequence[_Codes]) -> str:
    if all(kept) and {code for codes in (*discarded, *kept) for code in codes} == {POWER_CAP}:
        return "the GPU ran at its power cap throughout; so will training"
    parts = []
    if count := sum(map(bool, discarded)):
        were = "was" if count == 1 else "were"
        parts.append(
            f"{count} of {len(discarded) + len(kept)} blocks {were} discarded and repeated: {_in_words(discarded)}"
        )
    if count := sum(map(bool, kept)):
        were = "was" if count == 1 else "were"
        parts.append(f"{count} of {len(kept)} measurements {were} taken nevertheless: {_in_words(kept)}")
    return "; ".join(parts)


def _in_words(blocks: Sequence[_Codes]) -> str:
    """Returns the causes in words, the most frequent first."""
    counts = Counter(code for block in blocks for code in block)
    return ", ".join(_WORDS[code] for code, _ in counts.most_common())


def _among(causes: Collection[str], codes: Iterable[str]) -> _Codes:
    return tuple(code for code in codes if code in causes)


def _unsteady(measured: Sequence[Measurement]) -> Finding | None:
    count = sum(not measurement.steady for measurement in measured)
    if count == 0:
        return None
    return Finding(
        code="unsteady",
        message=f"in {count} of {len(measured)} measurements the step time was not steady when its warm-up ran out of "
        "time",
        figures={"discarded": 0, "kept": count, "of": len(measured)},
    )
