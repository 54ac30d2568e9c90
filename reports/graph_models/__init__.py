"""The cases of `graph_cases.py`, a module for each kind of trouble; importing it registers them."""

from graph_models import hooks, host_state, loops, memory, outputs, parts, pretrained, waits, weights
from graph_models.case import CASES, Case

_MODULES = (hooks, host_state, loops, memory, outputs, parts, pretrained, waits, weights)

__all__ = ["CASES", "Case"]
