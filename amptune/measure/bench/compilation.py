"""Handling of torch.compile in a process that measures one policy after another."""

from __future__ import annotations

from collections import Counter

import torch

from amptune.policy.settings import Policy

__all__ = ["Compilations"]

# A reason for a graph break is a page long: limits on the number of reasons and on the length of each.
REASONS, REASON_CHARACTERS = 3, 200


class Compilations:
    """The compiled graphs of this process: kept while one policy is measured again, dropped before another."""

    def __init__(self) -> None:
        self._of: Policy | None = None

    def begin(self, policy: Policy) -> None:
        """Drops another policy's graphs, which would interfere and hold memory. Call before the policy is applied."""
        if policy != self._of:
            self.forget()
        if policy.compile != "off":
            self._of = policy
            _counters().clear()

    def forget(self) -> None:
        """Drops all compiled graphs, CUDA graphs and their memory too; the cache on disk stays."""
        if self._of is not None:
            torch.compiler.reset()
            self._of = None

    @property
    def graphs(self) -> int:
        """Number of graphs compiled since `begin`."""
        return 0 if self._of is None else int(_counters()["stats"]["unique_graphs"])

    @property
    def breaks(self) -> tuple[str, ...]:
        """Reasons why the model is not one graph, the most frequent first; empty if it is one."""
        if self._of is None:
            return ()
        return tuple(_shortened(str(reason)) for reason, _ in _counters()["graph_break"].most_common(REASONS))


def _counters() -> dict[str, Counter[str]]:
    from torch._dynamo.utils import counters  # takes a second to import; only compiled policies need it

    return counters


def _shortened(reason: str) -> str:
    """Returns the reason's first line and explanation, without hints."""
    first, *lines = [line.strip() for line in reason.strip().splitlines()] or [""]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{first}: {why}"[:REASON_CHARACTERS] if why else first[:REASON_CHARACTERS]
