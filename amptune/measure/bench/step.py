"""One training step of the user's workload, run as in the README's loop."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from amptune.changes.tensor_tree import stored_in
from amptune.errors import TargetError
from amptune.measure.bench.failures import NonFiniteError
from amptune.measure.bench.trial_group import NEXT_STEP, TrialGroup
from amptune.runtime.training_step import OwnStep, RecipeStep
from amptune.runtime.tuned import Tuned
from amptune.workload.copied_model import plain_model
from amptune.workload.user_errors import user_code
from amptune.workload.workload import Workload

__all__ = ["FIRST_STEPS", "Stepper", "needs_closure", "nonfinite_in"]

# The first steps of a training: from a scale of 65536 a healthy model skips at most a few until its scale has settled.
FIRST_STEPS = 8


def nonfinite_in(model: torch.nn.Module) -> Iterator[str]:
    """Yields the names of the weights and buffers that hold an infinity, as masks do, or a NaN.

    Of sharded ones it sees this rank's part.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not torch.isfinite(stored_in(_own_part(tensor))[-1]).all():
            yield name


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor that FSDP2 sharded, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Stepper:
    """A callable that runs one training step on the next batch: forward, loss, backward, optimizer step.

    It is built after the policy was applied and makes its own optimizer, so each trial starts from fresh state. In a
    `group` the ranks share the model, by the workload's `parallel` or DistributedDataParallel.
    """

    def __init__(
        self, workload: Workload, tuned: Tuned, batches: Iterator[Any], group: TrialGroup | None = None
    ) -> None:
        self._workload = workload
        self._tuned = tuned
        self._batches = batches
        self._loss = torch.tensor(math.nan)
        self.steps = 0
        self._is_stepping = False
        """The number of steps so far."""
        self._group = group
        self._model = tuned.model
        if group is not None and workload.parallel is not None:  # FSDP2 replaces the parameters
            self._model = group.shared(tuned, workload.parallel)
        with user_code("building the optimizer"):
            built = workload.optimizer(tuned.model)
        if group is not None and workload.parallel is None:  # the optimizer may have frozen some, which DDP would miss
            self._model = group.shared(tuned, None)
        self.optimizers = tuple(map(tuned.optimizer, _required_optimizers(workload, built)))
        # `step` gets several as `optimizer(model)` returned them; its recipe has one
        self._optimizer: Any = built if isinstance(built, list | tuple) else self.optimizers[0]
        self._train: RecipeStep | None = None
        self._own: OwnStep | None = None
        if workload.loss is not None:
            loss = _checked(workload.loss)
            self._train = tuned.training_step(loss, self.optimizers[0], workload.clip, model=self._model)
        elif workload.step is not None:
            self._own = tuned.training_step(step=workload.step, optimizer=self._optimizer, model=self._model)

    def __call__(self) -> torch.Tensor:
        """Runs one optimizer step; returns the detached loss (of the last micro-batch)."""
        self.steps += 1
        if self._group is not None:
            self._group.tell(NEXT_STEP)
        self._is_stepping = True
        try:
            self._step()
        finally:
            self._is_stepping = False
        return self._loss

    def _step(self) -> None:
        if self._train is not None:
            for _ in range(self._tuned.accumulate):
                self._loss = self._train(next(self._batches))
        elif self._own is not None:
            self._loss = _require_scalar("step", self._own(next(self._batches))).detach()

    def leaves_out_some(self) -> bool:
        """Runs a step; returns True if some of the model's weights get no gradient in it, or if that cannot be seen."""
        weights = [parameter for parameter in self._tuned.model.parameters() if parameter.requires_grad]
        found: list[bool] = []
        self.before_optimizer(lambda *_: found.append(any(weight.grad is None for weight in weights)))
        self()
        return not found or any(found)

    def before_optimizer(self, look: Callable[[torch.optim.Optimizer, Collection[int]], None]) -> None:
        """Registers `look`, called before each optimizer step that the loss scaler does not skip.

        It is given the optimizer and the ids of the parameters that this one steps: while it does, gradients of another
        optimizer's may still be multiplied by the loss scale, or be left over from another pass.
        """
        for one in self.optimizers:
            # held now: in the step it holds the masters of half weights
            held = frozenset(id(parameter) for group in one.param_groups for parameter in group["params"])
            one.register_step_pre_hook(partial(self._look, look, held))

    def _look(
        self, look: Callable[..., None], held: Collection[int], optimizer: torch.optim.Optimizer, *_: Any
    ) -> None:
        """Calls `look`, unless the optimizer, which several may share, makes a step of another one."""
        if self._is_stepping:
            look(optimizer, held)

    @property
    def is_recipe(self) -> bool:
        """True if the step is amptune's own, of the workload's loss."""
        return self._train is not None

    @property
    def last_loss(self) -> float:
        """Loss of the last step; reading it waits for the device."""
        return float(self._loss)

    def first_step(self) -> tuple[float, float | None]:
        """Runs the first step; returns (loss, gradient norm).

        The norm is None for a workload with its own step, or if the first loss scale was too large. All ranks of a
        group call this at the same time, since each may have only a part of the gradients.
        """
        if self._train is None:
            return float(self()), None
        norms: list[float] = []
        self._train.before_update = lambda: norms.append(self._gradient_norm())
        loss = float(self())
        self._train.before_update = None
        return loss, norms[0] if norms and math.isfinite(norms[0]) else None

    def _gradient_norm(self) -> float:
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        # an embedding's sparse gradient may name a row twice: coalescing adds both
        parts = [stored_in(g.coalesce() if g.layout is torch.sparse_coo else g)[-1] for g in gradients]
        sharded, whole = ([part for part in parts if hasattr(part, "full_tensor") is has] for has in (True, False))
        norms = [torch.nn.utils.get_total_norm(some) for some in (sharded, whole) if some]  # both in one are refused
        whole_norms = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in norms]
        return math.hypot(*map(float, whole_norms)) / float(self._tuned.scaler.get_scale())

    def require_sound(self, steps: int, besides: Collection[str]) -> float:
        """Returns the share of `steps` that the loss scaler skipped. Raises `NonFiniteError` if training broke.

        Weights and buffers are to be finite `besides` those, by name, that were not when training began.
        """
        model: torch.nn.Module = plain_model(self._tuned.model)
        broken = next((name for name in nonfinite_in(model) if name not in besides), None)
        if broken is not None:
            kind = "weight" if broken in dict(model.named_parameters()) else "buffer"
            raise NonFiniteError(f"{kind} {broken} is not finite after {steps} steps")
        skipped = self._skipped_steps()
        if steps >= FIRST_STEPS and skipped >= steps:
            raise NonFiniteError(f"the loss scaler skipped all of {steps} steps: every gradient overflowed")
        return min(1.0, skipped / steps)

    def _skipped_steps(self) -> int:
        """Returns the number of skipped steps: each halves the scale; growth within a trial is too rare to hide it."""
        scaler = self._tuned.scaler
        if not scaler.is_enabled():
            return 0
        initial = scaler._init_scale  # torch has no public access to it
        return max(0, round(torch.tensor(initial / scaler.get_scale()).log2().item()))


def _required_optimizers(workload: Workload, built: Any) -> Sequence[torch.optim.Optimizer]:
    """Returns what `optimizer(model)` built, as a sequence. Raises `TargetError` if a training step cannot use it."""
    several = isinstance(built, list | tuple)
    found = built if several else (built,)
    others = [type(one).__name__ for one in found if not isinstance(one, torch.optim.Optimizer)]
    if others or not found:
        content = f" of {others[0] if others else 'nothing'}" if several else ""
        raise TargetError(
            f"optimizer(model) returned {type(built).__name__}{content}, not a torch.optim.Optimizer, or a tuple or "
            "list of them"
        )
    if several and workload.step is None:
        raise TargetError(
            f"optimizer(model) returned {len(found)} optimizers, and amptune's own step has one: write the step as "
            "step(tuned, model, optimizers, batch), in place of loss"
        )
    if workload.step is None and _needs_closure(found[0]):
        raise needs_closure(found[0])
    return found


def needs_closure(optimizer: torch.optim.Optimizer) -> TargetError:
    """Returns the error for an optimizer that calls the model itself, which amptune's own step does not let it do."""
    return TargetError(
        f"{type(optimizer).__name__} runs the model in its own step, by a closure that amptune's step does not give "
        "it: write the step as step(tuned, model, optimizer, batch), with optimizer.step(closure), in place of loss"
    )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _checked(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], torch.Tensor]:
    """Returns `loss` with its result checked. It holds nothing else: a loss that holds batches cannot be recorded."""
    return lambda model, batch: _require_scalar("loss", loss(model, batch))


def _require_scalar(part: str, loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TargetError(f"{part} returned {kind}, not a scalar tensor")
    return loss
