"""The guard's messages: each is a finding, and a warning at the call that made it known."""

from __future__ import annotations

import warnings
from typing import Any

from amptune.policy.findings import Finding

__all__ = ["Misuse", "PolicyMisuseWarning"]


class PolicyMisuseWarning(UserWarning):
    """A warning that the training loop does something that harms training and that PyTorch accepts silently."""


class Misuse:
    """The mistakes found in a loop, each kind once. They are noted where they are seen, and told by `tell`."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._told = 0

    def note(self, code: str, message: str, **figures: Any) -> None:
        if all(finding.code != code for finding in self.findings):
            self.findings.append(Finding(code=code, message=message, figures=figures))

    def tell(self, stacklevel: int) -> None:
        """Warns of what was noted since the last call; `stacklevel` is as `warnings.warn` would have it there."""
        for finding in self.findings[self._told :]:
            self._told += 1
            warnings.warn(str(finding), PolicyMisuseWarning, stacklevel=stacklevel + 1)
