"""Times by module, and the words that findings use for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from amptune.measure.results.step_profile import StepProfile
from amptune.policy.findings import Finding

__all__ = ["GAIN", "LISTED", "MOST", "NAMED", "SHARE", "Times", "called", "finding_about", "summed", "where"]

Times = Sequence[tuple[str | None, float]]

# A cause that takes less of the step is not worth a finding: half precision needs some casts, an optimizer its updates.
SHARE = 0.1
# Guessed share of a cause's time that a better kernel, layout or type saves; only the order of findings depends on it.
GAIN = 0.5
# The longest lists in a finding.
LISTED = 5
# A finding is about one module if that module takes at least this part of the time.
MOST = 0.5
# Otherwise it names this many modules, if together they take that part.
NAMED = 3
# No other module is named beside one that takes this part.
NEARLY_ALL = 0.95

_Key = TypeVar("_Key")


def finding_about(code: str, message: str, profile: StepProfile, times: Times, **figures: Any) -> Finding:
    """Returns a finding; its `module` takes at least `MOST` of the time, or is None if no module does."""
    module, ms = summed(times)[0]
    about = module if module and ms >= MOST * sum(time for _, time in times) else None
    return Finding(code=code, message=message, module=about, figures={**figures, "step_ms": profile.step_ms})


def where(times: Times, profile: StepProfile) -> str:
    """Returns the place of the time in words, for a message."""
    if not profile.attributed:
        return "in a compiled model, whose modules cannot be told apart"
    modules = summed(times)
    total = sum(ms for _, ms in modules)
    first, first_ms = modules[0]
    if first_ms >= NEARLY_ALL * total:
        return f"in {called(first)}"
    slowest = modules[:NAMED]
    if sum(ms for _, ms in slowest) >= MOST * total:
        return "most in " + ", ".join(f"{called(module)} ({ms:.2g} ms)" for module, ms in slowest)
    return f"spread over {len(modules)} modules (the slowest is {called(first)} with {first_ms:.2g} ms)"


def summed(times: Iterable[tuple[_Key, float]]) -> list[tuple[_Key, float]]:
    """Returns the total time of each key, the longest first."""
    totals: dict[_Key, float] = {}
    for one, ms in times:
        totals[one] = totals.get(one, 0.0) + ms
    return sorted(totals.items(), key=lambda item: -item[1])


def called(module: str | None) -> str:
    """Returns the name of a module for a message."""
    if module is None:
        return "code outside the model"
    return module or "the model's own forward"
