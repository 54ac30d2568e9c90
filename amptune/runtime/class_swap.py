"""Runs one module as a policy says, by swapping its class for a subclass with another forward.

After a class swap (`torch.nn.utils.parametrize` and FSDP2 do it too) the module is still the same object: state_dict
keys, `isinstance`, hooks, copies and pickles keep working, and torch.compile sees no graph break. With `forward`
replaced on the instance, a deep copy would run the original's weights; a wrapper would rename weights.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amptune.changes.tensor_tree import HALF_DTYPES, map_tensors
from amptune.errors import PolicyApplyError
from amptune.runtime.float8 import float8_attributes, no_float8_linear_because
from amptune.runtime.gradient_dtype import take_gradients_as_they_come
from amptune.runtime.recomputed import recomputed_forward_of
from amptune.runtime.replica import note_attributes, replica_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Change", "Precision", "obstacle", "overlaid", "precision_of", "swap", "swapped_class", "unswap"]

# Inside autocast: "fp32" returns its FP32 output, "fp32-cast" casts it back to autocast's dtype, "half" runs in
# autocast's dtype. With half weights: "half-weights" is the model that has them, with FP32 inputs and outputs;
# "fp32-weights" is a module within it that has FP32 weights, with half inputs and outputs.
Precision = Literal["fp32", "fp32-cast", "half", "half-weights", "fp32-weights"]
# "float8" multiplies in FP8.
# "recomputed" computes activations again in the backward pass, in the precision that the module has: it comes last.
Change = Precision | Literal["float8", "recomputed"]


# The device types on which autocast can be on. They come from this build of torch, as an input's device can mislead:
# a mask or a time step may be on the CPU while the features are on the GPU.
_accelerator = torch.accelerator.current_accelerator()
_DEVICE_TYPES = ("cpu",) if _accelerator is None else (_accelerator.type, "cpu")

# An entry lives as long as a module has the class (or until the garbage collector runs).
_classes: weakref.WeakValueDictionary[tuple[type[nn.Module], Change], type[nn.Module]]
_classes = weakref.WeakValueDictionary()


def obstacle(module: nn.Module, change: Change = "fp32") -> str | None:
    """Returns why a class swap cannot change this module, or None if it can."""
    if _is_taken(module, change):
        return "runs under a policy already; undo that one first (a copy of a patched model is patched too)"
    if change == "half" and any(module.children()):
        return "holds other modules; only modules without children can be run in half"
    if change == "half" and getattr(module, "sparse", False) is True:
        return "has sparse gradients, which PyTorch cannot cast back; leave it out of half_modules"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a TorchScript module, whose forward cannot be replaced; apply the policy before scripting"
    if "forward" in vars(module):
        return (
            "has a forward set on the instance (accelerate's prepare() and torch.compile do that), which hides the "
            "class's; apply the policy before that"
        )
    if change == "recomputed":
        scripted = any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules())
        return "holds a TorchScript module, whose buffers could change twice" if scripted else None
    if change == "float8" and (why := no_float8_linear_because(module)) is not None:
        return why
    half = {str(p.dtype) for p in module.parameters() if p.dtype in HALF_DTYPES}
    if half:
        return f"has weights in {' and '.join(sorted(half))}; call its .float(), or leave the rule out"
    return None


def _is_taken(module: nn.Module, change: Change) -> bool:
    """Returns True if the module has the class of a change, other than a precision below "recomputed"."""
    swapped = swapped_class(module)
    return swapped is not None and (change != "recomputed" or vars(swapped)["_amptune_change"] == "recomputed")


def swap(module: nn.Module, change: Change = "fp32") -> None:
    """Makes this change from now on; "fp32", "fp32-cast" and "half" change nothing outside autocast.

    The FP32 precisions cast half inputs, at any depth of the arguments; "half" casts FP32 inputs and the module's
    weights. Raises `PolicyApplyError` if there is an `obstacle`.
    """
    reason = obstacle(module, change)
    if reason is not None:
        raise PolicyApplyError(f"{type(module).__name__} {reason}")
    module.__class__ = _class_in(change, type(module))


def unswap(module: nn.Module) -> None:
    """Takes the last swap back. Raises `PolicyApplyError` if the module's class was changed again since."""
    if overlaid(module):
        raise PolicyApplyError(
            f"{type(module).__name__} got yet another class after the policy's (parametrize and fully_shard do that); "
            "undo that first"
        )
    swapped = swapped_class(module)
    if swapped is not None:
        (module.__class__,) = swapped.__bases__


def overlaid(module: nn.Module) -> bool:
    """Returns True if the module's class was changed again after the swap."""
    return swapped_class(module) not in (None, type(module))


def swapped_class(module: nn.Module) -> type[nn.Module] | None:
    """Returns the last class `swap` gave the module, also if another was put over it since; None without a swap."""
    return next((base for base in type(module).__mro__ if "_amptune_change" in vars(base)), None)


def precision_of(module: nn.Module) -> Precision | None:
    """Returns the precision `swap` gave the module; None without a swap."""
    precision: Precision | None = getattr(type(module), "_amptune_precision", None)
    return precision


def _class_in(change: Change, cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of `cls` with this change, made once, with the name that type rules and repr() use."""
    known = _classes.get((cls, change))
    if known is not None:
        return known
    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce_ex__": _reduction_of(cls, change),
        "_amptune_change": change,
        **_attributes_in(change, cls),
    }
    if change not in ("float8", "recomputed"):
        body["_amptune_precision"] = change
    becomes = getattr(cls, "cls_to_become", None)
    if becomes is not None:  # a lazy module takes this class after its first input
        body["cls_to_become"] = _class_in(change, becomes)
    made: type[nn.Module] = types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(body))
    _classes[cls, change] = made
    return made


def _attributes_in(change: Change, cls: type[nn.Module]) -> dict[str, Any]:
    """Returns the forward, and what else it needs of the class."""
    match change:
        case "float8":
            return float8_attributes()
        case "recomputed":
            return {"forward": recomputed_forward_of(cls)}
        case "half":
            return {"forward": _half_forward_of(cls)}
        case "half-weights":
            return {"forward": _half_weights_forward_of(cls)}
        case "fp32-weights":
            return {"forward": _fp32_weights_forward_of(cls)}
        case _:
            return {"forward": _fp32_forward_of(cls, change)}


def _half_weights_forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and DistributedDataParallel._active_ddp_module is not None:
            take_gradients_as_they_come(self)  # DDP's buckets are in half like the weights, and hold no other dtype
        args, kwargs = map_tensors(_floats_to_half, (args, kwargs))
        return map_tensors(_to_fp32, cls.forward(self, *args, **kwargs))

    return forward


def _fp32_weights_forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(_to_fp32, (args, kwargs))
        return map_tensors(_floats_to_half, cls.forward(self, *args, **kwargs))

    return forward


def _floats_to_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def _fp32_forward_of(cls: type[nn.Module], precision: Precision) -> Callable[..., Any]:
    # wraps() keeps the signature readable: trainers drop the batch columns that forward does not name.
    @functools.wraps(cls.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        on = [device_type for device_type in _DEVICE_TYPES if torch.is_autocast_enabled(device_type)]
        if not on:
            return cls.forward(self, *args, **kwargs)
        run = _run_compiled if torch.compiler.is_compiling() else _run_eager
        output = run(on, cls.forward, (self, *map_tensors(_to_fp32, args)), map_tensors(_to_fp32, kwargs))
        if precision == "fp32":
            return output
        dtype = torch.get_autocast_dtype(on[0])
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor, output)

    return forward


def _half_forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        on = [device_type for device_type in _DEVICE_TYPES if torch.is_autocast_enabled(device_type)]
        if not on:
            return cls.forward(self, *args, **kwargs)
        dtype = torch.get_autocast_dtype(on[0])
        args, kwargs = map_tensors(lambda tensor: _to_half(tensor, dtype), (args, kwargs))
        weights = {name: _to_half(weight, dtype) for name, weight in self.named_parameters(recurse=False)}
        if torch.compiler.is_compiling():
            return _run_compiled(on, torch.func.functional_call, (self, weights, args, kwargs), {})
        replica = replica_of(self, _parameters=weights)
        before = dict(vars(replica))
        try:
            return _run_eager(on, cls.forward, (replica, *args), kwargs)
        finally:
            note_attributes(replica, self, before)

    return forward


def _to_half(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _run_eager(on: Sequence[str], call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Sets autocast's switch directly: entering and leaving the context manager costs several times as much."""
    for device_type in on:
        torch.set_autocast_enabled(device_type, False)
    try:
        return call(*args, **kwargs)
    finally:
        for device_type in on:
            torch.set_autocast_enabled(device_type, True)


def _run_compiled(on: Sequence[str], call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Uses autocast's context manager, which torch.compile traces into the graph."""
    if not on:
        return call(*args, **kwargs)
    with torch.amp.autocast(on[0], enabled=False):
        return _run_compiled(on[1:], call, args, kwargs)


def _reduction_of(cls: type[nn.Module], change: Change) -> Callable[[nn.Module, Any], Any]:
    """Returns a `__reduce_ex__` by which copies and pickles name the importable class and swap the rebuilt module."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807  # becomes the method of that name
        reduced = cls.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        build, args, *rest = reduced
        build, *args = [cls if part is type(self) else part for part in (build, *args)]
        return (_rebuild, (change, build, tuple(args)), *rest)

    return __reduce_ex__


def _rebuild(change: Change, build: Callable[..., nn.Module], args: Sequence[Any]) -> nn.Module:
    module = build(*args)
    module.__class__ = _class_in(change, type(module))
    return module
