"""Replicas of modules for a single pass, as DataParallel makes them: another thread meets the modules as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["note_attributes", "replica_of", "replica_with_buffers"]


def replica_of(module: nn.Module, **own: Any) -> nn.Module:
    """Returns an object of the module's class with its attributes, save those that are given."""
    replica = object.__new__(type(module))
    vars(replica).update(vars(module), **own)
    return replica


def note_attributes(replica: nn.Module, module: nn.Module, before: Mapping[str, Any]) -> None:
    """Gives the module what a pass set as attributes of its replica, which had those `before`."""
    vars(module).update({name: one for name, one in vars(replica).items() if before.get(name, before) is not one})


def replica_with_buffers(
    module: nn.Module, buffers: Mapping[nn.Module, Mapping[str, torch.Tensor]], known: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Returns a replica in which modules have these buffers; the module itself if it holds none of them."""
    if module not in known:
        known[module] = module
        inner = {name: one and replica_with_buffers(one, buffers, known) for name, one in module._modules.items()}
        if module in buffers or any(inner[name] is not one for name, one in module._modules.items()):
            own = {**module._buffers, **buffers.get(module, {})}
            known[module] = replica_of(module, _modules=inner, _buffers=own)
    return known[module]
