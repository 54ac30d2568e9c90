"""torch.compile in a process that measures one policy after another."""

from __future__ import annotations

from collections import Counter

import torch

from amptune.policy.settings import Policy

__all__ = ["Compilations"]

# A reason for a graph break is a page long; so many are kept, and so much of each.
REASONS, REASON_CHARACTERS = 3, 200


class Compilations:
    """What this process has compiled: kept while one policy is measured again, forgotten before another."""

    def __init__(self) -> None:
        self._of: Policy | None = None

    def begin(self, policy: Policy) -> None:
        """Before the policy is applied. A graph compiled for another one would be in the way, and hold its memory."""
        if policy != self._of:
            self.forget()
        if policy.compile != "off":
            self._of = policy
            _counters().clear()

    def forget(self) -> None:
        """Drops everything compiled, CUDA graphs and their memory too; what lies on disk stays."""
        if self._of is not None:
            torch.compiler.reset()
            self._of = None

    @property
    def graphs(self) -> int:
        """How many graphs were compiled since `begin`."""
        return 0 if self._of is None else int(_counters()["stats"]["unique_graphs"])

    @property
    def breaks(self) -> tuple[str, ...]:
        """Why the model is not one graph, the most frequent first; empty if it is."""
        if self._of is None:
            return ()
        return tuple(_shortened(str(reason)) for reason, _ in _counters()["graph_break"].most_common(REASONS))


def _counters() -> dict[str, Counter[str]]:
    from torch._dynamo.utils import counters  # takes a second to import, and only what compiles needs it

    return counters


def _shortened(reason: str) -> str:
    """What it is and why, without the hints."""
    first, *lines = [line.strip() for line in reason.strip().splitlines()] or [""]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{first}: {why}"[:REASON_CHARACTERS] if why else first[:REASON_CHARACTERS]
