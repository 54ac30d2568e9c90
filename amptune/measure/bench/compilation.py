"""Handling of torch.compile in a process that measures one policy after another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from amptune.policy.settings import Policy

__all__ = ["Compilations"]

# A reason for a graph break is a page long: limits on the number of reasons and on the length of each.
REASONS, REASON_CHARACTERS = 3, 200


class Compilations:
    """The compiled graphs of this process: kept while one policy is measured again, dropped before another.

    `begun` counts the times that PyTorch began to compile a graph, or to record one as a CUDA graph. Once a limit on
    compiling is reached, it runs such code eagerly: that is not counted, and shows in the steps.
    """

    def __init__(self) -> None:
        self._of: Policy | None = None
        self.begun = 0

    def begin(self, policy: Policy) -> None:
        """Drops another policy's graphs, which would interfere and hold memory. Call before the policy is applied."""
        if policy != self._of:
            self.forget()
        if policy.compile != "off":
            self._of = policy
            _counters().clear()
            self._listen()

    def forget(self) -> None:
        """Drops all compiled graphs, CUDA graphs and their memory too; the cache on disk stays."""
        if self._of is not None:
            torch.compiler.reset()
            self._of = None

    def _listen(self) -> None:
        """Has PyTorch tell of each graph that it begins to compile or record; resetting the compiler ends that."""
        from torch._dynamo.callback import callback_handler

        if self._count not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._count)

    def _count(self, _: Any) -> None:
        self.begun += 1

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
