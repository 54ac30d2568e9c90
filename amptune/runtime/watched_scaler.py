"""The loss scaler of a guarded training loop: it works as usual, and reports its calls to the guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amptune.runtime.loss_scaling import PolicyScaler

if TYPE_CHECKING:
    import torch

    from amptune.runtime.guarding import Guard

__all__ = ["WatchedScaler"]


class WatchedScaler(PolicyScaler):
    """A `PolicyScaler` that reports to `guard`, if it has one; a copy has none."""

    guard: Guard | None = None

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        if self.guard is not None and self.is_enabled():
            self.guard.after_scale(scaled)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.guard is not None and self.is_enabled():
            self.guard.after_unscale(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self.guard is not None:
            self.guard.before_scaler_step(optimizer, has_closure=bool(args or kwargs))
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        if self.guard is not None and self.is_enabled():
            self.guard.after_update(self)

    def state_dict(self) -> dict[str, Any]:
        if self.guard is not None:
            self.guard.checkpoints.scaler_saved()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.guard is not None:
            self.guard.checkpoints.scaler_loaded()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "guard": None}
