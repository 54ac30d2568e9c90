"""An optimizer of a script, as it was before a policy, to be put back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from amptune.runtime.optimizer import lay_out_state

if TYPE_CHECKING:
    import torch

__all__ = ["OptimizerSnapshot"]


class OptimizerSnapshot:
    """An optimizer as it is in the script: its settings, hooks and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        kept = vars(optimizer).keys() - {"state", "param_groups"}
        self._vars = {name: copy.copy(vars(optimizer)[name]) for name in kept}
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = copy.deepcopy(optimizer.state_dict()["state"])

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts its hooks and settings back, and drops what was added."""
        for name in vars(optimizer).keys() - self._vars.keys() - {"state", "param_groups"}:
            del vars(optimizer)[name]
        vars(optimizer).update({name: copy.copy(value) for name, value in self._vars.items()})
        for group, own in zip(optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(own)

    def put_state_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts its state back, and its settings but for a fused kernel."""
        for group, own in zip(optimizer.param_groups, self._groups, strict=True):
            group.update({name: value for name, value in own.items() if name not in ("fused", "foreach")})
        optimizer.load_state_dict(
            {"state": copy.deepcopy(self._state), "param_groups": optimizer.state_dict()["param_groups"]}
        )
        lay_out_state(optimizer)
