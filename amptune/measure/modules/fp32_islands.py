"""FP32 islands: the matrix products and convolutions of a training step that stay in FP32 under autocast.

A model makes them by `torch.autocast(…, enabled=False)` or by FP32 tensors in a backward pass of its own, an optimizer
by multiplying matrices, and PyTorch by attention that no fused kernel computes. Each is timed again by itself, once for
each shape.
"""

from __future__ import annotations

import sys
import sysconfig
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amptune.changes.flags import set_fp32_math
from amptune.changes.tensor_tree import map_tensors, tensors_in
from amptune.hardware.generations import generation_of
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.clocks import finish
from amptune.measure.modules.replay import TIMED_RUNS, floating_in, later_ms
from amptune.measure.numerics.short_training import Training
from amptune.measure.results.half_effects import Half, Island
from amptune.policy.settings import Policy
from amptune.workload.user_errors import is_the_users

__all__ = ["find_islands"]

_aten = torch.ops.aten
# RNNs are left out: stock PyTorch runs cuDNN's in TF32 already.
_WATCHED = frozenset(
    (
        _aten.mm,
        _aten.addmm,
        _aten._addmm_activation,
        _aten.bmm,
        _aten.baddbmm,
        _aten.addbmm,
        _aten.convolution,
        _aten.convolution_backward,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_efficient_attention_backward,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
)

_TORCH = Path(torch.__file__).resolve().parent
_SITE_PACKAGES = tuple({Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")})
# Frames above this one belong to the code that called `backward`, not to the operation that runs.
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def find_islands(bench: Bench, policy: Policy, dtype: Half) -> tuple[Island, ...]:
    """Returns the islands of one training step under `policy` and autocast, the longest time first.

    Operations inside a kernel or a C++ extension of the user's own are not seen. Raises any error of the step.
    """
    policy = replace(policy, autocast=dtype, fp32_math="stock")
    with Training.on(bench, policy) as training:
        step_ms = 1000 * training.step_s()
        training.restart()
        watch = _Watch(bench.device)
        with watch.paths_of(bench.model), watch:
            training.step()
        return tuple(watch.found(step_ms))


class _Site(NamedTuple):
    """The module that runs an operation and the place in the code that calls it, as in `Island`."""

    module: str | None
    where: str


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    """Sees every operation below autograd and autocast, in the forward and in the backward pass."""

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._backend = torch._C._dispatch_key_for_device(device.type)
        self._kernels = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, self._backend))
        has_tf32 = device.type == "cuda" and generation_of(torch.cuda.get_device_capability(device)).tf32
        self._maths = ("stock", "tf32") if has_tf32 else ("stock",)
        self._paths: list[str] = []
        self._sites: dict[int, _Site] = {}  # of autograd nodes, by their sequence numbers
        self._numbers: list[int] = []  # these, in order
        self._counts: Counter[tuple[_Site, Any]] = Counter()
        self._times: dict[Any, dict[str, list[Callable[[], float]]]] = {}

    @contextmanager
    def paths_of(self, model: nn.Module) -> Iterator[None]:
        """Notes which of the model's modules runs."""
        with ExitStack() as hooks:
            for path, module in model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                    hooks.enter_context(module.register_forward_pre_hook(partial(self._begins, path)))
                    hooks.enter_context(module.register_forward_hook(self._ends, always_call=True))
            yield

    def _begins(self, path: str, *_: Any) -> None:
        self._paths.append(path)

    def _ends(self, *_: Any) -> None:
        self._paths.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # one that takes functions, as flex_attention
            return func(*args, **kwargs)
        site = self._site()
        if self._is_island(func, args, kwargs):
            self._note(site, func, args, kwargs)
        elif func.overloadpacket not in _WATCHED:
            with self:  # as a mode does not see into what it calls
                if self._is_custom(func, args, kwargs):
                    return func.redispatch(self._kernels, *args, **kwargs)
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)

    def _is_custom(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns whether it is a custom operation with a kernel for the device, which may call other operations."""
        if func.namespace in ("aten", "prim", "prims", "profiler") or not tensors_in((args, kwargs)):
            return False
        return torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), self._backend)

    def _site(self) -> _Site:
        """Returns where the running operation comes from; in the backward pass, where its forward operation came from.

        An autograd node is made just before its operation runs, so that the last number given is the node's.
        """
        node = torch._C._current_autograd_node()
        module, where = (None, "") if node is None else self._site_of(node._sequence_nr())
        site = _Site(self._paths[-1] if self._paths else module, _place() or where)
        number = torch._C._autograd._get_sequence_nr() - 1
        if number not in self._sites:
            insort(self._numbers, number)
            self._sites[number] = site
        return site

    def _site_of(self, number: int) -> _Site:
        """Returns the site of the first operation after the node of this number was made: its own, or one inside it."""
        place = bisect_left(self._numbers, number)
        return self._sites[self._numbers[place]] if place < len(self._numbers) else _Site(None, "")

    def _is_island(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func.overloadpacket not in _WATCHED:
            return False
        return all(
            tensor.dtype is torch.float32
            and tensor.device.type == self._device.type
            and tensor.layout is torch.strided  # sparse products do not use TF32
            for tensor in floating_in((args, kwargs))
        )

    def _note(self, site: _Site, func: Any, args: Any, kwargs: Any) -> None:
        """Counts the product; times it if it is the first of its shape."""
        key = (func, *map(_described, (*args, *kwargs.items())))
        self._counts[site, key] += 1
        if key not in self._times:
            self._times[key] = self._timed(func, args, kwargs)

    def _timed(self, func: Any, args: Any, kwargs: Any) -> dict[str, list[Callable[[], float]]]:
        if func._schema.is_mutable:
            args, kwargs = map_tensors(torch.clone, (args, kwargs))
        run, times = partial(func, *args, **kwargs), defaultdict(list)
        with torch.no_grad(), torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            for math in self._maths:
                undo = set_fp32_math(math)
                try:
                    run()  # the library chooses its kernel
                    times[math] = [later_ms(run, self._device) for _ in range(TIMED_RUNS)]
                finally:
                    undo()
        return times

    def found(self, step_ms: float) -> Sequence[Island]:
        """Returns the islands; a step takes `step_ms`."""
        finish(self._device)
        sums: dict[_Site, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (site, key), count in self._counts.items():
            for math, times in self._times[key].items():
                sums[site][math] += count * min(later() for later in times)
        islands = [_island(site, ms, step_ms) for site, ms in sums.items()]
        return sorted(islands, key=lambda island: -island.ms)


def _island(site: _Site, ms: Mapping[str, float], step_ms: float) -> Island:
    return Island(
        module=site.module, where=site.where, ms=ms["stock"], tf32_ms=ms.get("tf32"), share=ms["stock"] / step_ms
    )


def _described(argument: Any) -> Any:
    """Returns what a product's time depends on."""
    return (argument.shape, argument.stride()) if isinstance(argument, torch.Tensor) else repr(argument)


def _place() -> str | None:
    """Returns `file:line` of the innermost frame outside PyTorch and amptune; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _BACKWARD:
        file = _shown(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@cache
def _shown(filename: str) -> str | None:
    """Returns a file as people know it; None if it is PyTorch's, amptune's or Python's own."""
    path, here = Path(filename).resolve(), Path.cwd()
    if is_the_users(filename):
        return str(path.relative_to(here) if path.is_relative_to(here) else path)
    if path.is_relative_to(_TORCH):
        return None
    library = next((one for one in _SITE_PACKAGES if path.is_relative_to(one)), None)
    own = "" if library is None else str(path.relative_to(library))
    return None if not own or own.startswith("amptune") else own
