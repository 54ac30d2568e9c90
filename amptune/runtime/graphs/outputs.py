"""Takes apart what a forward pass returns, and names its tensors for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.tensor_use import place_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CONSTANTS", "OUTPUT", "is_kept", "named_buffers", "named_outputs", "require_apart", "tensors_of"]

# Types that an output may hold besides tensors: every replay returns the recorded value.
CONSTANTS = (type(None), bool, int, float, str)
OUTPUT = "output"


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Returns each tensor once. Raises `NotRecordableError` for an unknown type, or a tensor with attributes."""
    leaves = tree_flatten(outputs)[0]
    strange = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *CONSTANTS))), None)
    if strange is not None:
        name = type(strange).__name__
        hint = " (use_cache=False leaves it out)" if name.endswith("Cache") else ""  # in transformers
        raise NotRecordableError(f"returns a {name}, whose contents are not known{hint}")
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
    if any(map(vars, tensors)):
        raise NotRecordableError("returns a tensor with attributes of its own")
    return tensors


def require_apart(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Raises `NotRecordableError` for shared memory: replays return copies, which a loop's writes would not reach."""
    taken = set(map(place_of, others))
    for place in map(place_of, outputs):
        if place in taken:
            raise NotRecordableError("returns what shares memory with another output, an input, a weight or a buffer")
        taken.add(place)


def is_kept() -> bool:
    """Returns True if the running backward pass was asked to keep its graph (retain_graph)."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())  # what cannot be asked counts as unsafe


def named_outputs(outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the outputs by a name for messages."""
    return {f"{OUTPUT} {number}": output.detach() for number, output in enumerate(outputs, 1)}


def named_buffers(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns buffers by a name for messages."""
    return {f"the buffer {name}": buffer.detach() for name, buffer in buffers.items()}
