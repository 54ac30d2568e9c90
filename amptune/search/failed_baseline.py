"""The error to raise if the baseline failed: without a baseline there is nothing to compare with."""

from __future__ import annotations

from amptune.errors import NothingFeasibleError, TargetError, UserCodeError
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import Policy

__all__ = ["error_of_baseline"]


def error_of_baseline(baseline: Policy, failure: Failure) -> Exception:
    """Returns the user's own error if that made the baseline fail, else an error that says the baseline fails."""
    if failure.exception == "TargetError":
        return TargetError(failure.message)
    if failure.kind == "error":
        place = f" ({failure.where})" if failure.where else ""
        text = f"the training step raised {failure.exception}: {failure.message}{place}"
        return UserCodeError(text, kind=failure.exception or "Exception", where=failure.where)
    hint = "; name a smaller batch with --batch-size, or another --baseline" if failure.kind == "oom" else ""
    return NothingFeasibleError(f"the baseline ({baseline}) fails, so nothing can be held against it: {failure}{hint}")
