"""torch.compile, as a policy has it: of the whole model, with its loss or alone, or of its repeated blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from amptune.changes.blocks import compile_blocks, compile_in_place

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from amptune.policy.settings import CompileMode
    from amptune.runtime.way_back import WayBack

__all__ = ["compiled"]

# What a rule for modules, or the model itself, puts into a graph to switch autocast off and on. AOTAutograd caches no
# graph with a function whose name begins with an underscore (torch/_functorch/_aot_autograd/autograd_cache.py). Their
# arguments are in the graph, and so in the cache's key. Graphs with them would be traced anew in each process.
_AUTOCAST_IN_GRAPHS = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


def compiled(mode: CompileMode, model: nn.Module, steps: WayBack, *, in_place: bool = False) -> nn.Module:
    """Returns the compiled model, or the model itself, compiled in place, for what else is put around it.

    torch.compile sets attributes on `model`, which `steps` removes again.
    """
    if mode == "off":
        return model
    steps.add(_cache_graphs_with_autocast())
    if mode == "blocks":
        steps.add(compile_blocks(model))
        return model
    if in_place or mode == "step":
        steps.add(compile_in_place(model, None if mode in ("default", "step") else mode))
        return model
    before = set(vars(model))
    whole = cast("nn.Module", torch.compile(model, mode=None if mode == "default" else mode))
    for mark in vars(model).keys() - before:
        steps.add(vars(model).pop, mark, None)
    return whole


def _cache_graphs_with_autocast() -> Callable[[], None]:
    """Lets AOTAutograd cache graphs that switch autocast; returns a function that undoes it."""
    from torch._inductor import config  # only compiled policies need it

    new = {name: "amptune" for name in _AUTOCAST_IN_GRAPHS if name not in config.unsafe_marked_cacheable_functions}
    config.unsafe_marked_cacheable_functions = {**config.unsafe_marked_cacheable_functions, **new}

    def undo() -> None:
        marked = config.unsafe_marked_cacheable_functions
        config.unsafe_marked_cacheable_functions = {name: key for name, key in marked.items() if name not in new}

    return undo
