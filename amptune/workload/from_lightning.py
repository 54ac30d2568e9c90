"""A workload from a LightningModule: its `training_step` and its `configure_optimizers`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from amptune.errors import TargetError
from amptune.workload.copied_model import CopiedModel, plain_model
from amptune.workload.loader_batches import LoaderBatches
from amptune.workload.rebuilt_optimizer import without_schedule

__all__ = ["parts_of_lightning"]

# What `configure_optimizers` may ask a Trainer for its schedules, which are not part of a measured step.
TRAINER = SimpleNamespace(
    estimated_stepping_batches=1000,
    num_training_batches=1000,
    max_epochs=1,
    max_steps=1000,
    world_size=1,
    num_devices=1,
)


def parts_of_lightning(module: Any, loader: Any, batch_size: int | None) -> dict[str, Any]:
    """Returns the parts of a `Workload` by name. Raises `TargetError` for what cannot be one."""
    if not hasattr(module, "configure_optimizers"):
        raise TargetError(f"module is {type(module).__name__}, not a LightningModule")
    if not module.automatic_optimization:
        raise TargetError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization = False): Lightning then leaves the "
            "step to its code, and amptune cannot see what a step is. Write it as Workload(step=…)"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise TargetError(f"{type(module).__name__}.training_step(dataloader_iter) draws its batches itself")
    return {
        "own_loop": False,
        "model": CopiedModel(module),
        **LoaderBatches(_loader_of(module if loader is None else loader), batch_size).parts,
        "loss": TrainingStep(),
        "optimizer": configured_optimizer,
    }


def _loader_of(source: Any) -> Iterable[Any]:
    """Returns a loader, that of a LightningDataModule, or that of the module itself, prepared as `fit` does."""
    if not hasattr(source, "train_dataloader"):
        loader: Iterable[Any] = source
        return loader
    source.prepare_data()
    source.setup("fit")
    try:
        drawn = source.train_dataloader()
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":
            raise
        raise TargetError(
            f"{type(source).__name__} has no train_dataloader(): give its loader, or a LightningDataModule, as in "
            "Workload.from_lightning(module, loader)"
        ) from error
    if not isinstance(drawn, Iterable) or isinstance(drawn, Mapping):
        raise TargetError(
            f"{type(source).__name__}.train_dataloader() returned {type(drawn).__name__}, not one loader: give one of "
            "them, as in Workload.from_lightning(module, loader)"
        )
    return drawn


class TrainingStep:
    """The loss that a LightningModule's `training_step` returns; a compiled model has it compiled, as in Lightning."""

    def __init__(self) -> None:
        self._compiled: tuple[Any, Any] = (None, None)

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        module = plain_model(model)
        batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
        takes_index = len(inspect.signature(module.training_step).parameters) > 1
        returned = self._step_of(model)(batch, 0) if takes_index else self._step_of(model)(batch)
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        if not isinstance(loss, torch.Tensor):
            raise TargetError(f"{type(module).__name__}.training_step returned {type(returned).__name__}, not a loss")
        return loss

    def _step_of(self, model: Any) -> Any:
        compile_ = getattr(model, "dynamo_ctx", None)  # of the module that torch.compile returns
        if compile_ is None:
            return plain_model(model).training_step
        if self._compiled[0] is not model:
            self._compiled = model, compile_(plain_model(model).training_step)
        return self._compiled[1]

    def __reduce__(self) -> tuple[type[TrainingStep], tuple[()]]:
        """Leaves out the compiled step."""
        return type(self), ()


def configured_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the single optimizer of `configure_optimizers`, in any form that Lightning takes."""
    module = plain_model(model)
    trainer, module._trainer = module._trainer, TRAINER
    try:
        configured = module.configure_optimizers()
    finally:
        module._trainer = trainer
    optimizers = _optimizers_in(configured)
    if len(optimizers) != 1:
        raise TargetError(
            f"{type(module).__name__}.configure_optimizers returned {len(optimizers)} optimizers, but automatic "
            "optimization has one. Write several as Workload(step=…)"
        )
    return without_schedule(optimizers[0])


def _optimizers_in(configured: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers; a list of schedulers beside them, or under another key, is left out."""
    if isinstance(configured, torch.optim.Optimizer):
        return [configured]
    if isinstance(configured, dict):
        return _optimizers_in(configured.get("optimizer"))
    if isinstance(configured, list | tuple):
        return [optimizer for part in configured for optimizer in _optimizers_in(part)]
    return []
