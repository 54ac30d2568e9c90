"""Finds the parameters that autocast rounds to half precision; operations on the others get them in FP32."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amptune.changes.tensor_tree import HALF_DTYPES
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import failure_of
from amptune.measure.numerics.short_training import Training
from amptune.policy.settings import Policy

__all__ = ["parameters_in_half"]

_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class _Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which parameters are cast to half, themselves or what is computed from parameters alone.

    An LSTM's are cast to fp16 for cuDNN, whatever dtype autocast has.

    `rounded` and `sources` are storages; a weight under weight_norm has the two parametrized tensors as its sources.
    """

    def __init__(self, parameters: Collection[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded: set[int] = set()
        self._sources = {_storage(parameter): {_storage(parameter)} for parameter in parameters}
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the storage of one that is known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1:  # a backward pass casts what its forward pass has cast
            return found
        given = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        if func in _CASTS and made[0].dtype in HALF_DTYPES:
            self.rounded.update(*(self._sources.get(_storage(one), ()) for one in given))
        elif given and all(_storage(one) in self._sources for one in given):
            sources = set().union(*(self._sources[_storage(one)] for one in given))
            for one in made:
                if _storage(one) != -1 and _storage(one) not in self._sources:
                    self._sources[_storage(one)] = sources
                    self._alive.append(one)
        return found


def _storage(tensor: torch.Tensor) -> int:
    """Returns an address; -1 for an empty or sparse tensor."""
    return (tensor.untyped_storage().data_ptr() or -1) if tensor.layout == torch.strided else -1


def parameters_in_half(bench: Bench, fp32: Policy) -> tuple[Collection[str], str | None]:
    """Returns (names of the parameters that autocast rounds in a training step, None).

    If that cannot be seen, returns (the names of all parameters, the reason in words).
    """
    names = [name for name, _ in bench.model.named_parameters()]
    try:
        with Training.on(bench, fp32) as training:
            training.step()  # what the model keeps from its first step is FP32's
        with Training.on(bench, replace(fp32, autocast="bf16")) as training:
            parameters = dict(bench.model.named_parameters())
            rounded = _Rounded(parameters.values())
            with rounded:
                training.step()
            found = {name for name, parameter in parameters.items() if _storage(parameter) in rounded.rounded}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # what the user's code raises there is judged elsewhere
        return names, f"a step under autocast bf16 failed: {failure_of(error)}"
    return (found, None) if found else (names, "autocast casts no parameter")
