"""Sensitivity to half precision, from one instrumented training step. When the backward pass reaches a module, this
module alone is run again, in FP32 and in half.
"""

from __future__ import annotations

import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from amptune.changes.tensor_tree import map_tensors, tensors_in
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.clocks import finish
from amptune.measure.modules.fp32_islands import find_islands
from amptune.measure.modules.replay import Call, Replay, floating_in, kept_as_it_is, later_ms, versions_of
from amptune.measure.numerics.randomness import without_dropout
from amptune.measure.numerics.short_training import Training
from amptune.measure.results.half_effects import Half, Island, ModuleSensitivity, Sensitivity, Stream
from amptune.policy.knobs.loss_scale import LossScale
from amptune.policy.settings import Policy
from amptune.runtime.tuned import AUTOCAST_DTYPES

__all__ = ["sense"]

# Modules of one type and shape share their times: this many runs of them are timed in total.
TIMED_RUNS = 3
# A cast of this many numbers measures the cost of casts per byte.
CAST_NUMEL = 2**24
FP32_BYTES = torch.float32.itemsize


def sense(bench: Bench, policy: Policy, dtypes: Sequence[Half]) -> Sensitivity:
    """Measures every module without children in one FP32 step, under `policy`'s FP32 math.

    Inputs are held until the backward pass reaches their module, as training does for most of them. One module at a
    time is run again; its buffers and the random generators are restored afterwards. A module is left out if it cannot
    be run again: it has no gradient, raises an error, or its inputs are overwritten. The islands are those of another
    step, under autocast in the first of the `dtypes`.
    """
    with Training.on(bench, policy) as training, without_dropout(bench.model), _out_of_place(bench.model):
        training.step_s()  # kernels are loaded, cuDNN's plans searched
        training.restart()
        watch = _Watch(bench, dtypes)
        with watch.hooked():
            training.step()
        found = Sensitivity(
            modules=tuple(watch.found()),
            cast_ms_per_byte=_cast_ms_per_byte(bench.device, AUTOCAST_DTYPES[dtypes[0]]),
        )
    return replace(found, islands=_islands(bench, policy, dtypes[0]))


def _islands(bench: Bench, policy: Policy, dtype: Half) -> tuple[Island, ...]:
    """Returns the FP32 islands; none if the step does not run so, as the times of the modules are of use without."""
    try:
        return find_islands(bench, policy, dtype)
    except Exception:  # noqa: BLE001  # the user's code may raise anything
        traceback.print_exc()  # into the worker's log
        return ()


class _Watch:
    """Hooks on every module without children, and the figures that they collect."""

    def __init__(self, bench: Bench, dtypes: Sequence[Half]) -> None:
        self._model = bench.model
        self._device = bench.device
        self._dtypes = dtypes
        self._seen: dict[str, ModuleSensitivity] = {}
        self._keys: dict[str, tuple[Any, ...]] = {}
        self._times: dict[tuple[Any, ...], list[Callable[[], float]]] = defaultdict(list)
        self._made_by: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._versions: dict[str, list[int]] = {}
        self._busy = False
        self._failed: set[str] = set()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for path, module in self._model.named_modules():
                if not any(module.children()) and not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                    before, after = partial(self._begins, path), partial(self._ends, path)
                    hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
            yield

    def _begins(self, path: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._versions[path] = versions_of((args, kwargs))

    def _ends(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Holds the call's inputs until the gradient of its output is known."""
        if self._busy:
            return
        seen = self._seen.get(path) or _unseen(path)
        taken, given = floating_in((args, kwargs)), floating_in(output)
        makers = filter(None, map(self._maker_of, taken))
        self._seen[path] = replace(seen, producers=tuple(dict.fromkeys((*seen.producers, *makers))))
        self._made_by |= {id(tensor): (weakref.ref(tensor), path) for tensor in given}
        wanted = [tensor for tensor in given if tensor.requires_grad]
        if not wanted:
            return
        need = [tensor.requires_grad for tensor in tensors_in((args, kwargs))]
        held_args, held_kwargs = map_tensors(torch.Tensor.detach, (args, kwargs))
        call = Call(module, held_args, held_kwargs, need, self._versions[path])
        _on_gradients(wanted, lambda gradients: self._replay(path, call, gradients))

    def _maker_of(self, tensor: torch.Tensor) -> str | None:
        made, path = self._made_by.get(id(tensor), (None, None))
        return path if made is not None and made() is tensor else None

    def _replay(self, path: str, call: Call, gradients: Sequence[torch.Tensor | None]) -> None:
        """Runs the call again in FP32 and in half; an error leaves out only this module."""
        if call.done:  # another backward pass over the same graph
            return
        self._busy = True
        try:
            with torch.enable_grad(), kept_as_it_is(call.module, self._device):
                self._look(path, call, gradients)
                self._time(call, gradients)
        except Exception:  # noqa: BLE001  # the module may raise anything when it is run by itself
            self._failed.add(path)
        finally:
            call.finish()
            self._busy = False

    def _look(self, path: str, call: Call, gradients: Sequence[torch.Tensor | None]) -> None:
        if not call.intact:
            raise RuntimeError("its inputs are written to, by itself or by what comes after")
        outputs = Replay(call, gradients, None, self._device, 1.0).run()
        with kept_as_it_is(call.module, self._device):
            stream = self._stream_of(call)
        seen, self._keys[path] = self._seen[path], call.key
        self._seen[path] = replace(
            seen,
            calls=seen.calls + 1,
            stream=stream,
            input_bytes=seen.input_bytes + FP32_BYTES * _numel(floating_in((call.args, call.kwargs))),
            output_bytes=seen.output_bytes + FP32_BYTES * _numel(outputs),
        )

    def _stream_of(self, call: Call) -> Stream:
        """Returns the stream, from the output dtypes for FP32 inputs and for half inputs."""
        dtype = AUTOCAST_DTYPES[self._dtypes[0]]
        with torch.no_grad(), torch.autocast(self._device.type, dtype=dtype):
            of_fp32, of_half = (
                [tensor.dtype for tensor in floating_in(call.module(*args, **kwargs))]
                for args, kwargs, _ in (call.inputs(None), call.inputs(dtype))
            )
        if dtype in of_fp32:
            return "half"
        return "follows" if dtype in of_half else "fp32"

    def _time(self, call: Call, gradients: Sequence[torch.Tensor | None]) -> None:
        # Dropout is switched off here, so its time would not be that of training.
        if len(self._times[call.key, None]) >= TIMED_RUNS or "Dropout" in type(call.module).__name__:
            return
        for dtype in (None, *self._dtypes):
            scale = LossScale().init if dtype == "fp16" else 1.0
            replay = Replay(call, gradients, None if dtype is None else AUTOCAST_DTYPES[dtype], self._device, scale)
            replay.run()
            self._times[call.key, dtype].append(later_ms(replay.backpropagate, self._device))

    def _ms(self, path: str, dtype: Half | None) -> float | None:
        """Returns the fastest timed run, times the number of calls; first runs may include one-time costs."""
        times = [later() for later in self._times.get((self._keys[path], dtype), ())]
        return min(times) * self._seen[path].calls if times else None

    def found(self) -> Iterator[ModuleSensitivity]:
        finish(self._device)
        for path, seen in self._seen.items():
            if seen.calls and path not in self._failed:
                half_ms = {dtype: self._ms(path, dtype) for dtype in self._dtypes}
                yield replace(seen, fp32_ms=self._ms(path, None), half_ms=half_ms)


def _unseen(path: str) -> ModuleSensitivity:
    """Returns the record of a module that has not been run again yet."""
    return ModuleSensitivity(
        path=path, calls=0, fp32_ms=None, half_ms={}, stream="follows", input_bytes=0, output_bytes=0
    )


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _cast_ms_per_byte(device: torch.device, dtype: torch.dtype) -> float:
    """Returns a cast's time per byte read or written, when launched behind other work."""
    tensor = torch.ones(CAST_NUMEL, device=device)
    bytes_cast = tensor.nbytes + tensor.to(dtype).nbytes
    times = [later_ms(lambda: tensor.to(dtype), device) for _ in range(TIMED_RUNS)]
    finish(device)
    return min(later() for later in times) / bytes_cast


@contextmanager
def _out_of_place(model: nn.Module) -> Iterator[None]:
    """Switches off in-place modules: their inputs are held for later."""
    changed = [module for module in model.modules() if vars(module).get("inplace") is True]
    for module in changed:
        module.inplace = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in changed:
            module.inplace = True  # type: ignore[assignment]


def _on_gradients(tensors: Sequence[torch.Tensor], look: Callable[[Sequence[torch.Tensor | None]], None]) -> None:
    """Registers `look` to be called when the gradients of all tensors are known.

    One tensor gets a plain hook: a multi-grad hook is not called if the backward pass starts there (torch 2.13).
    """
    if len(tensors) == 1:
        tensors[0].register_hook(lambda gradient: look([gradient]))  # type: ignore[no-untyped-call]
    else:
        torch.autograd.graph.register_multi_grad_hook(tensors, look)
