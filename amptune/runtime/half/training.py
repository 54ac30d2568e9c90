"""Training with weights in half: the weights, their optimizers, their checkpoints, and the loss scaler's access.

Checkpoints are in FP32 under the model's own names; also those of its parts and of modules around it.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from amptune.errors import PolicyApplyError
from amptune.policy.findings import Finding
from amptune.runtime.gradient_dtype import CAN_DIFFER
from amptune.runtime.half.masters import MasterWeights, parameters_of, require_unrounded_state, state_in
from amptune.runtime.half.weights import HALF, HalfWeights
from amptune.runtime.weight_hook import WeightHook

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from amptune.policy.settings import Policy
    from amptune.runtime.class_swap import Change
    from amptune.runtime.module_precision import Selected

__all__ = ["NOT_FOR_FSDP2", "HalfTraining"]

NOT_FOR_FSDP2 = (
    "weights: half holds whole weights in half, and FSDP2 shards FP32 weights and gathers them in half by itself, "
    "which is the same: use fully_shard(…, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)) and a policy "
    "whose weights are fp32"
)


class HalfTraining(WeightHook):
    """The half weights of one model, with what its optimizers need to train them, from `convert` until `undo`.

    Modules `selected` for FP32 keep FP32 weights. Raises `PolicyApplyError` if the others cannot be held in half.
    """

    in_half = True

    def __init__(self, policy: Policy, model: nn.Module, selected: Sequence[tuple[Selected, Change]]) -> None:
        named = [one.module for one, change in selected if change in ("fp32", "fp32-weights")]
        self._model = model
        self._kept = _modules_kept(model, named, keep_batchnorm=policy.keep_batchnorm_fp32)
        _require_convertible(model, self._kept, masters=policy.master_weights)
        self._held = HalfWeights(masters=policy.master_weights)
        self._checkpoints: dict[nn.Module, Sequence[RemovableHandle]] = {}
        self._masters: weakref.WeakKeyDictionary[torch.optim.Optimizer, MasterWeights] = weakref.WeakKeyDictionary()
        self._plain: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def convert(self) -> None:
        self._held.convert(self._model, self._kept)
        self._adopt()

    def _adopt(self) -> None:
        """Takes in what was made of half weights since, as `weight_norm` does, and has all saved in FP32."""
        self._held.adopt(self._model, self._kept)
        for module in self._held.modules:
            if module not in self._checkpoints and (module._parameters or module._buffers):
                self._checkpoints[module] = _checkpoint_in_fp32(module, self._held)

    def findings(self) -> Iterator[Finding]:
        if self._held.is_empty:
            yield Finding(
                code="half-weights-without-effect",
                message="the model has no FP32 weights that are not to stay in FP32, so weights: half changes none",
            )

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer master weights if the policy has them, else converts its state to half.

        Raises `PolicyApplyError` for sharded weights, for an optimizer that cannot have master weights, and without
        master weights for an `eps` that half cannot hold.
        """
        _require_unsharded(optimizer)
        self._adopt()
        if not self._held.has_masters:
            _require_eps_in_half(optimizer, self._held)
            state_in(HALF, optimizer, self._held)  # it may have trained the model in FP32 until now
            self._plain.add(optimizer)
        elif optimizer not in self._masters:
            require_unrounded_state(optimizer, self._held)
            self._masters[optimizer] = MasterWeights(self._held, optimizer)

    def lent_to(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Returns a context in which the optimizer holds the parameters that its steps update."""
        masters = self._masters.get(optimizer)
        return nullcontext() if masters is None else masters.lent(optimizer)

    def require_masters(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._masters or not self._held.has_masters:
            return
        if any(parameter in self._held for parameter in parameters_of(optimizer)):
            raise PolicyApplyError(
                "the policy trains FP32 master weights, which this optimizer does not have: "
                "optimizer = tuned.optimizer(optimizer) gives it them"
            )

    def widen_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._held.widen_gradients(parameters_of(optimizer))

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._held.write(tensor, value)

    def undo(self) -> None:
        """Converts the weights back to FP32; their optimizers continue with them."""
        self._adopt()
        for optimizer, masters in self._masters.items():
            masters.remove(optimizer)
        for optimizer in self._plain:
            state_in(torch.float32, optimizer, self._held)
        self._masters.clear()
        for handle in chain.from_iterable(self._checkpoints.values()):
            handle.remove()
        self._held.undo()


def _require_unsharded(optimizer: torch.optim.Optimizer) -> None:
    """Raises `PolicyApplyError` if PyTorch's fully_shard has sharded the optimizer's weights."""
    if any(type(parameter.data).__name__ == "DTensor" for parameter in parameters_of(optimizer)):
        raise PolicyApplyError(NOT_FOR_FSDP2)


def _require_eps_in_half(optimizer: torch.optim.Optimizer, held: HalfWeights) -> None:
    """Raises `PolicyApplyError` if the `eps` of half weights becomes 0 in half: their updates divide by it."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        lost = isinstance(eps, float) and eps != 0 and not torch.tensor(eps, dtype=HALF)
        if lost and any(parameter in held for parameter in group["params"]):
            raise PolicyApplyError(
                f"the eps of {type(optimizer).__name__}, {eps:g}, is 0 in half, and the policy holds weights and the "
                "optimizer's state in half, so updates divide by 0: build the optimizer with eps=1e-4, or use a policy "
                "with master_weights: true"
            )


def _checkpoint_in_fp32(module: nn.Module, held: HalfWeights) -> Sequence[RemovableHandle]:
    """Makes state_dict() and load_state_dict() of the module work in FP32, until the handles are removed."""
    return (
        module.register_state_dict_post_hook(_Saves(held)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_Loads(held)),  # type: ignore[no-untyped-call]
    )


@dataclass(slots=True)
class _Saves:
    """A hook that makes state_dict() return FP32. A class, so that a copied model gets a hook with its own weights."""

    held: HalfWeights
    _from_public_api: bool = False  # set by PyTorch

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, tensor, value in self.held.fp32_values(module):
            if state.get(prefix + name, tensor) is not tensor:  # keep_vars asks for the tensors themselves
                state[prefix + name] = value


@dataclass(slots=True)
class _Loads:
    """A hook that gives the masters the loaded values before load_state_dict() rounds them."""

    held: HalfWeights

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise PolicyApplyError(
                "load_state_dict(assign=True) would replace the half weights of this policy: load without assign, or "
                "before the policy is applied"
            )
        self.held.take_masters(module, state, prefix)


def _is_plain(tensor: torch.Tensor) -> bool:
    has_own_operations = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_nested and not has_own_operations


def _modules_kept(model: nn.Module, named: Collection[nn.Module], *, keep_batchnorm: bool) -> set[nn.Module]:
    """Returns the named modules, all modules inside them, and BatchNorm if the policy says so."""
    kept = {inner for module in named for inner in module.modules()}
    if keep_batchnorm:  # as in Apex: a BatchNorm without weights has nothing to keep
        kept |= {module for module in model.modules() if isinstance(module, _BatchNorm) and module.affine}
    return kept


def _require_convertible(model: nn.Module, kept: Collection[nn.Module], *, masters: bool) -> None:
    """Raises `PolicyApplyError` if the weights cannot be held in half as the policy asks."""
    if masters and not CAN_DIFFER:
        raise PolicyApplyError(
            f"master_weights need gradients in FP32 for weights in half, which PyTorch has since 2.10; this is "
            f"{torch.__version__}: use a newer one, or autocast fp16, which needs no master weights"
        )
    owners: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and (module._parameters or module._buffers):
            raise PolicyApplyError(
                f"{path or 'the model itself'} is a TorchScript module, whose checkpoints cannot be made in FP32 while "
                "its weights are in half: use autocast, or the module as it was before scripting"
            )
        if module in kept:
            owners |= {p: path for p in module._parameters.values() if p is not None}
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.dtype is torch.float32 and not _is_plain(tensor):
                raise PolicyApplyError(
                    f"{f'{path}.{name}' if path else name} is sparse, nested or of a class of its own "
                    f"({type(tensor).__name__}, {tensor.layout}), and cannot be held in half with its FP32 value: keep "
                    f"{path or 'the model itself'} in FP32 (fp32_modules), or use autocast"
                )
    for path, module in model.named_modules():
        tied = [] if module in kept else [p for p in module._parameters.values() if p is not None and p in owners]
        if tied:
            raise PolicyApplyError(
                f"{owners[tied[0]]} stays in FP32 and shares a weight with {path or 'the model itself'}, whose "
                "weights are to be in half: keep both in FP32 (fp32_modules), or untie them"
            )
