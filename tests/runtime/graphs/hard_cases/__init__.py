"""Hard cases for recorded passes, a module for each room of hazards; importing it registers them."""

from . import hooks, host_state, loops, memory, outputs, parts, waits, weights
from .case import CASES, Case

_MODULES = (hooks, host_state, loops, memory, outputs, parts, waits, weights)

__all__ = ["CASES", "Case"]
