"""A workload from a Trainer of transformers, which is built anew in each measuring process."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from amptune.errors import TargetError
from amptune.workload.copied_model import CopiedModel, plain_model
from amptune.workload.loader_batches import LoaderBatches
from amptune.workload.rebuilt_optimizer import RebuiltOptimizer

__all__ = ["parts_of_trainer"]

# Arguments of a Trainer that only computes losses of a model that it does not move: amptune does the rest.
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "tf32": None,
    "torch_compile": False,
    "torch_compile_mode": None,
    "torch_compile_backend": None,
    "report_to": [],
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "disable_tqdm": True,
}
# What the base class is built from, where it has it; the other attributes of a subclass are copied.
GIVEN = ("train_dataset", "data_collator", "processing_class", "compute_loss_func")


def parts_of_trainer(trainer: Any) -> dict[str, Any]:
    """Returns the parts of a `Workload` by name. Raises `TargetError` for what cannot be one."""
    if not all(hasattr(trainer, name) for name in ("compute_loss", "create_optimizer", "get_train_dataloader")):
        raise TargetError(f"trainer is {type(trainer).__name__}, not a Trainer of transformers")
    for name, what in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        if getattr(trainer, name, False):
            raise TargetError(f"the Trainer uses {what}, which holds the weights itself: amptune measures one device")
    if trainer.train_dataset is None:
        raise TargetError("the Trainer has no train_dataset: there is nothing to train on")
    copied = CopiedTrainer(trainer)
    return {
        "own_loop": False,
        "model": copied,
        "batch": copied.batch,
        "loader": copied.loader,
        "loss": copied.loss,
        "optimizer": copied.optimizer,
        "batch_size": trainer.args.per_device_train_batch_size,
        "accumulate": trainer.args.gradient_accumulation_steps,
        "clip": trainer.args.max_grad_norm or None,
    }


class CopiedTrainer:
    """A function that returns copies of a Trainer's model, with the other parts for a Trainer that computes losses."""

    def __init__(self, trainer: Any) -> None:
        self._kind = type(trainer)
        self._callbacks = trainer.callback_handler.callbacks
        self._model = CopiedModel(trainer.model)
        self._arguments = trainer.args
        self._given = {name: getattr(trainer, name) for name in GIVEN if getattr(trainer, name, None) is not None}
        self._own_optimizer = None
        if trainer.optimizer is not None:
            self._own_optimizer = RebuiltOptimizer(trainer.optimizer, trainer.model)
        known = _attributes_of(_base_of(self._kind))
        self._others = {name: value for name, value in vars(trainer).items() if name not in known}
        self._built: Any = None
        self._batches: LoaderBatches | None = None

    def __call__(self) -> nn.Module:
        """Returns a copy of the model in training mode, as `train()` prepares it."""
        model: Any = self._model().train()
        if self._arguments.gradient_checkpointing:
            model.gradient_checkpointing_enable(self._arguments.gradient_checkpointing_kwargs)
        if self._built is None:
            self._built = self._build(model)
        module: nn.Module = model
        return module

    def batch(self, n: int) -> Any:
        """Returns n samples from the Trainer's dataset and collator."""
        if self._batches is None:
            size = self._arguments.per_device_train_batch_size
            self._batches = LoaderBatches(self.loader(size), size)
        return self._batches.batch(n)

    def loader(self, batch_size: int) -> Iterable[Any]:
        """Returns the Trainer's own loader, of this batch size."""
        trainer = self._trainer()
        trainer._train_batch_size = batch_size
        loader: Iterable[Any] = trainer.get_train_dataloader()
        return loader

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns what `compute_loss` does; it gets a new dict, as it may take the labels out."""
        loss: torch.Tensor = self._trainer().compute_loss(model, dict(batch))
        return loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns what `create_optimizer` makes, or one like that which the Trainer was given."""
        if self._own_optimizer is not None:
            return self._own_optimizer(model)
        trainer = self._trainer()
        trainer.model, trainer.optimizer = plain_model(model), None
        trainer.create_optimizer()
        optimizer: torch.optim.Optimizer = trainer.optimizer
        return optimizer

    def give_back(self) -> None:
        """Undoes the policy that a `PolicyCallback` applied, and moves the Trainer's model to the CPU."""
        for callback in self._callbacks:
            if (tuned := getattr(callback, "tuned", None)) is not None:
                tuned.undo()
        self._model.give_back()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the callbacks, and the Trainer that was built here."""
        return {**self.__dict__, "_callbacks": [], "_built": None, "_batches": None}

    def _trainer(self) -> Any:
        if self._built is None:
            self()
        return self._built

    def _build(self, model: nn.Module) -> Any:
        """Runs the base class's `__init__`: a subclass's own takes what nobody knows; what it set is copied."""
        trainer: Any = object.__new__(self._kind)
        base = _base_of(self._kind)
        takes = inspect.signature(base.__init__).parameters
        given = {name: value for name, value in self._given.items() if name in takes}
        base.__init__(trainer, model=model, args=_quiet(self._arguments), **given)
        vars(trainer).update(self._others)
        return trainer


def _quiet(arguments: Any) -> Any:
    """Returns the same arguments, for a Trainer that only computes losses."""
    kind = type(arguments)
    names = [field.name for field in fields(kind) if field.init]
    return kind(**{name: QUIET.get(name, getattr(arguments, name)) for name in names})


def _base_of(kind: type) -> Any:
    """Returns the class `Trainer` of transformers among a Trainer's bases."""
    return next(base for base in kind.__mro__ if base.__module__ == "transformers.trainer")


def _attributes_of(base: type) -> set[str]:
    """Returns the names of the attributes that a class sets in its methods."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
    places = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {place.attr for place in places if isinstance(place.value, ast.Name) and place.value.id == "self"}
