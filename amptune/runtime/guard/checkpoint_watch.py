"""Checks that a checkpoint with the optimizer's state has the loss scaler's too; else loss scaling restarts."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from amptune.runtime.guard.misuse import Misuse, Place

__all__ = ["CheckpointWatch"]


class CheckpointWatch:
    """A watch on saved and loaded states. Its hooks run at checkpoints only, so they may stay."""

    def __init__(self, misuse: Misuse) -> None:
        self._misuse = misuse
        self._followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._forget()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._followed:
            return
        self._followed.add(optimizer)
        try:
            self._handles.append(optimizer.register_state_dict_pre_hook(self._optimizer_saved))
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._optimizer_loaded))
        except AttributeError:  # a wrapper of an optimizer that has no hooks of its own
            return

    def scaler_saved(self) -> None:
        self._scaler_was_saved = True

    def scaler_loaded(self) -> None:
        self._scaler_was_loaded = True

    def look(self, *, training_began: bool) -> None:
        """Warns, at the end of a step, of a checkpoint that is incomplete; `training_began` is as before that step.

        Before training, a call of optimizer.state_dict() is taken to be for loading, as torch.distributed.checkpoint
        does it.
        """
        if training_began and self._saved_at is not None and not self._scaler_was_saved:
            self._misuse.say(
                "scaler-not-saved",
                "the checkpoint that took optimizer.state_dict() at {here} left the loss scaler out, so a run that "
                "resumes from it skips steps until its scale has settled again: save tuned.scaler.state_dict() too",
                self._saved_at,
            )
        if not training_began and self._loaded_at is not None and not self._scaler_was_loaded:
            self._misuse.say(
                "scaler-not-restored",
                "training resumes with the optimizer's state of {here} and without the loss scaler's, so it skips "
                "steps until the scale has settled again: call tuned.scaler.load_state_dict() too",
                self._loaded_at,
            )
        self._forget()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forget(self) -> None:
        self._saved_at: Place | None = None
        self._loaded_at: Place | None = None
        self._scaler_was_saved = self._scaler_was_loaded = False

    def _optimizer_saved(self, _: torch.optim.Optimizer) -> None:
        self._saved_at = self._misuse.here()

    def _optimizer_loaded(self, _: torch.optim.Optimizer) -> None:
        self._loaded_at = self._misuse.here()
