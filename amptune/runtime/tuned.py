"""The result of `amptune.apply`: a policy applied to a model, with everything a training loop needs of it."""

from __future__ import annotations

import weakref
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, overload

import torch

from amptune.changes.layout import convert_batch
from amptune.errors import PolicyApplyError
from amptune.runtime.model_device import ModelDevice
from amptune.runtime.optimizer import fuse
from amptune.runtime.scaler import PolicyScaler, scaler_for
from amptune.runtime.training_step import OwnStep, RecipeStep
from amptune.runtime.weight_hook import PLAIN_WEIGHTS, WeightHook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

    from torch import nn

    from amptune.policy.findings import Finding
    from amptune.policy.settings import Policy
    from amptune.runtime.batch_norm import FiniteStatistics
    from amptune.runtime.claim_watch import ClaimWatch
    from amptune.runtime.graphs.dispatch import Recordings
    from amptune.runtime.graphs.graphed_model import GraphedModel
    from amptune.runtime.graphs.step_recordings import StepRecordings
    from amptune.runtime.graphs.whole_step import WholeStep
    from amptune.runtime.guard.guard import Guard
    from amptune.runtime.guard.step_watch import StepWatch
    from amptune.runtime.ranks import Ranks

__all__ = ["AUTOCAST_DTYPES", "Tuned"]

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _WatchedAutocast(torch.amp.autocast):
    """PyTorch's autocast, which tells the guard's watch when training enters it."""

    watch: StepWatch | None = None

    def __enter__(self) -> Any:
        if self.watch is not None and torch.is_grad_enabled():
            self.watch.autocast_is_used()
        return super().__enter__()  # type: ignore[no-untyped-call]


class Tuned:
    """A policy applied to a model. As a context manager it undoes itself at the end.

    `model` is the given model, or the wrapper that the policy's compile or cuda_graphs put around it. `findings` grow
    while the loop is set up, and while it is watched. `claim_watch` compares its steps with the policy file's evidence,
    `guard` looks for its mistakes; either is None if `apply` was told so, and a guard of the first steps after those.
    """

    def __init__(
        self,
        policy: Policy,
        plain_model: nn.Module,
        *,
        model: nn.Module,
        findings: Sequence[Finding],
        undo: Callable[[], None],
        guard: Guard | None = None,
        claim_watch: ClaimWatch | None = None,
        statistics: FiniteStatistics | None = None,
        weights: WeightHook | None = None,
        graphed: GraphedModel | None = None,
        whole_step: WholeStep | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.model = model
        self.claim_watch = claim_watch
        self._plain_model = plain_model
        self._device = ModelDevice(plain_model)
        self._findings = list(findings)
        self._undo = undo
        self.guard = guard
        if guard is not None:
            forget = weakref.WeakMethod(self._forget_guard)  # weak, since the model's hooks refer to the guard
            guard.at_end = lambda: (method := forget()) and method()
        self._statistics = statistics
        self._weights = weights or PLAIN_WEIGHTS
        self._graphed = graphed
        self._whole_step = whole_step
        self._ranks = ranks
        self._have_ranks_agreed = ranks is None
        self._scalers: dict[str, PolicyScaler] = {}
        self._active = True

    def __repr__(self) -> str:
        state = "" if self._active else ", undone"
        count = len(self.findings)
        found = f", {count} finding{'' if count == 1 else 's'}" if count else ""
        return f"<Tuned: {self.policy} on {type(self._plain_model).__name__}{state}{found}>"

    @property
    def findings(self) -> tuple[Finding, ...]:
        not_recorded = None if self._graphed is None else self._graphed.recordings.why_not
        missed = None if self.claim_watch is None else self.claim_watch.finding
        return (
            *self._findings,
            *(() if not_recorded is None else (not_recorded,)),
            *(() if self._whole_step is None else self._whole_step.findings),
            *(() if self.guard is None else self.guard.findings),
            *(() if missed is None else (missed,)),
        )

    def autocast(self, *, cache_enabled: bool | None = None) -> torch.amp.autocast:
        """Returns autocast for the device the model is on now; disabled if the policy has it off, or was undone.

        `cache_enabled` is PyTorch's option: CUDA graphs that are captured by hand need it to be False. In a distributed
        job this raises `PolicyApplyError`, once, if the ranks do not have one policy.
        """
        device_type = self._device.device_type
        if not torch.compiler.is_compiling():
            if self._ranks is not None and not self._have_ranks_agreed:
                self._have_ranks_agreed = self._ranks.are_done()
            if self.guard is not None:
                self.guard.end_when_due()
            if self.claim_watch is not None:
                self.claim_watch.pass_begins(device_type)
            if self._whole_step is not None:
                self._whole_step.look()
        dtype = AUTOCAST_DTYPES.get(self.policy.autocast) if self._active else None
        enabled = dtype is not None
        options: Any = {"dtype": dtype, "enabled": enabled, "cache_enabled": cache_enabled}
        if torch.compiler.is_compiling() or self.guard is None:
            return torch.amp.autocast(device_type, **options)
        watched = _WatchedAutocast(device_type, **options)
        watched.watch = self.guard.step_watch
        return watched

    @property
    def scaler(self) -> PolicyScaler:
        """The loss scaler for the device the model is on now, the same object at each call.

        It is enabled for autocast fp16, and for half weights if the policy has master weights or its own loss scale.
        """
        device_type = self._device.device_type
        if device_type not in self._scalers:
            self._scalers[device_type] = self._new_scaler(device_type)
        return self._scalers[device_type]

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the same optimizer, fused in place if the policy says so; adds a finding if it cannot be fused.

        With master weights its steps update the masters, and the model's weights become the rounded masters. Raises
        `PolicyApplyError` for sharded half weights; with master weights for LBFGS, and without them for an `eps` that
        is 0 in half.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PolicyApplyError(
                f"tuned.optimizer() takes a built torch.optim.Optimizer, not {type(optimizer).__name__}: "
                "tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))"
            )
        self._weights.serve(optimizer)
        if self.policy.fused_optimizer:
            self._fuse(optimizer)
        if self.guard is not None:
            self.guard.step_watch.served |= {id(one) for group in optimizer.param_groups for one in group["params"]}
        if self.claim_watch is not None:
            self.claim_watch.follow(optimizer)
        return optimizer

    def step(self, optimizer: torch.optim.Optimizer, *, clip: float | None = None) -> None:
        """Does what follows `backward()` in PyTorch's AMP recipe; `clip` is the largest norm of all gradients.

        These are `scaler.unscale_` and `clip_grad_norm_`, if gradients are clipped, `scaler.step` and `scaler.update`:
        a loop with several optimizers calls them by itself, since it updates the scaler once.
        """
        scaler = self.scaler
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        scaler.step(optimizer)
        scaler.update()

    @overload
    def training_step(
        self,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        clip: float | None = None,
        *,
        model: nn.Module | None = None,
    ) -> RecipeStep: ...

    @overload
    def training_step(
        self,
        *,
        step: Callable[[Any, Any, Any, Any], Any],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        model: nn.Module | None = None,
    ) -> OwnStep: ...

    def training_step(
        self, loss: Any = None, optimizer: Any = None, clip: float | None = None, *, step: Any = None, model: Any = None
    ) -> Any:
        """Returns a function that trains on a batch, which a policy with `cuda_graphs: step` replays as a whole.

        With `loss` it is PyTorch's AMP recipe, from autocast to `zero_grad`: `loss(model, batch)` returns a scalar, as
        in a `Workload`; `batch` comes in the policy's memory format. `clip` is the largest norm of all gradients.
        With `step` it is one's own: `step(tuned, model, optimizer, batch)` does all, with `tuned.autocast()` and
        `tuned.scaler`, and what it returns comes back; `optimizer` is one, or a sequence.

        `model` is `tuned.model`, or the given one, such as DistributedDataParallel around that. Raises
        `PolicyApplyError` for what is no optimizer, and in a distributed job without a given model.
        """
        several = isinstance(optimizer, list | tuple) and step is not None
        optimizers = list(optimizer) if several else [optimizer]
        wrong = next((one for one in optimizers if not isinstance(one, torch.optim.Optimizer)), None)
        if wrong is not None or not optimizers:
            raise PolicyApplyError(
                f"tuned.training_step() takes one built torch.optim.Optimizer, not {type(optimizer).__name__}; several "
                "are for a step of your own: tuned.training_step(step=step, optimizer=(one, other))"
            )
        if (loss is None) == (step is None) or (step is not None and clip is not None):
            raise PolicyApplyError(
                "tuned.training_step() takes either a loss, with clip, or a step of your own, which clips by itself: "
                "tuned.training_step(loss, optimizer) or tuned.training_step(step=step, optimizer=optimizer)"
            )
        if model is None and self._ranks is not None:
            raise PolicyApplyError(
                "tuned.training_step() in a distributed job needs the model whose gradients the ranks exchange: "
                "tuned.training_step(loss, optimizer, model=DistributedDataParallel(tuned.model)); model=tuned.model "
                "if they exchange none, or if fully_shard shards it"
            )
        called, from_model = loss, model
        if self._active and self.policy.compile == "step" and loss is not None and model in (None, self.model):
            called, from_model = torch.compile(loss), self._plain_model  # the model in it
        train: RecipeStep | OwnStep = (
            RecipeStep(self, called, optimizer, clip, from_model)
            if step is None
            else OwnStep(self, step, optimizer, model)
        )
        if self._whole_step is not None and self._active:
            code = {"loss": loss} if step is None else {"step": step}
            train.recordings = self._whole_step.of(self, {**code, "optimizer": optimizers}, optimizers, model)
        return train

    @property
    def recordings(self) -> Recordings | StepRecordings | None:
        """The recorded CUDA graphs: of whole training steps if `training_step` has them recorded, else of passes."""
        passes = None if self._graphed is None else self._graphed.recordings
        return passes if self._whole_step is None else self._whole_step.recordings

    def _fuse(self, optimizer: torch.optim.Optimizer) -> None:
        with self._weights.lent_to(optimizer):
            finding = fuse(optimizer)
        if finding is not None:
            self._findings.append(finding)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Gives a parameter or buffer of the model an FP32 value; a master of a tensor in half keeps that value."""
        self._weights.write(tensor, value)

    def batch(self, batch: Any) -> Any:
        """Returns the batch in the policy's memory format: tensors at any depth of tuples, dicts and dataclasses."""
        if self.claim_watch is not None and not torch.compiler.is_compiling():
            self.claim_watch.batch_given(batch)
        return convert_batch(batch, self.policy.memory_format) if self._active else batch

    @property
    def batch_size(self) -> int:
        """Samples per device and micro-batch. Raises `PolicyApplyError` if the policy leaves it out.

        It does not return None, since `DataLoader(batch_size=None)` silently stops batching.
        """
        if self.policy.batch_size is None:
            raise PolicyApplyError("the policy leaves batch_size out: pass your own batch size to the DataLoader")
        if self.claim_watch is not None:
            self.claim_watch.has_measured_size = True
        return self.policy.batch_size

    @property
    def loader_options(self) -> dict[str, Any]:
        """The policy's options of a DataLoader, as `DataLoader(dataset, batch_size, **tuned.loader_options)` takes."""
        settings = self.policy.loader
        return {} if settings is None else {name: value for name, value in asdict(settings).items() if value}

    @property
    def accumulate(self) -> int:
        """Micro-batches per optimizer step."""
        return self.policy.accumulate

    @property
    def rank_weight(self) -> float:
        """The factor of this rank's mean loss where a profile gives ranks other batch sizes; 1 if they have one.

        DDP averages gradients over ranks; so each sample counts alike. Raises `PolicyApplyError` if another rank has
        applied no policy.
        """
        return 1.0 if self._ranks is None else self._ranks.weight

    def before_undo(self, do: Callable[[], object]) -> None:
        """Has `do` called when the policy is undone, before that."""
        undo = self._undo

        def both() -> None:
            do()
            undo()

        self._undo = both

    def undo(self) -> None:
        """Restores the model, its layout and the process's flags; a second call does nothing.

        Weights in half become FP32 again, with the value of their master, or without one their rounded value. Buffers
        get their original values, unless they were written to. An optimizer stays fused, and keeps its state.

        Raises `PolicyApplyError`, with nothing undone, while something that was put over the policy is in the way.
        After an interruption (Ctrl-C) another call goes on.
        """
        if self._active:
            self._undo()
            self._weights = PLAIN_WEIGHTS
            for scaler in self._scalers.values():
                scaler.statistics, scaler.weights = None, PLAIN_WEIGHTS
            self.model = self._plain_model
            if self.guard is not None:
                self.guard.end()
            if self.claim_watch is not None:
                self.claim_watch.end()
            self._active = False

    def _forget_guard(self) -> None:
        """Keeps what the guard found, and drops it."""
        if self.guard is not None:
            found = self.guard.findings
            self.guard, self._findings = None, [*self._findings, *found]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def _new_scaler(self, device_type: str) -> PolicyScaler:
        scaler = scaler_for(self.policy, device_type)
        if self.guard is not None:
            self.guard.follow(scaler)
        if self._active:
            scaler.statistics, scaler.weights = self._statistics, self._weights
        return scaler
