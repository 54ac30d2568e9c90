"""A policy in place: around the forward pass of modules that a script calls by itself, and at its optimizer's steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from amptune.changes.tensor_tree import HALF_DTYPES, map_tensors
from amptune.runtime.script.hooks import as_policys, autocast_as_it_is
from amptune.runtime.way_back import WayBack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from amptune.runtime.tuned import Tuned

__all__ = ["CalledModules", "InPlace"]

# What a module calls in place of its forward pass and hooks, if it has this. `nn.Module.__getstate__` leaves it out, so
# that copies and pickles of a model are plain: a copy that called the first one's forward pass would be that one.
_CALLED = "_compiled_call_impl"


class CalledModules(nn.Module):
    """Modules that a script calls one by one, as one model: its forward pass is that of the part with a number."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(str(number), part)

    def forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        return self._modules[str(number)](*args, **kwargs)  # type: ignore[misc]


class InPlace:
    """A policy that is applied to the model of `tuned`, around the calls of `called`, which are it or its parts.

    They run under the policy's autocast and in its layout, compiled or recorded as it says, and return FP32. An error
    within is given to `broken`, which returns once another policy is in place; without it, it is raised. `begins` is
    called before each call, and returns True if another policy is in place since.
    """

    def __init__(
        self,
        tuned: Tuned,
        called: Sequence[nn.Module],
        broken: Callable[[Exception], None] | None = None,
        begins: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tuned, self._broken, self._begins = tuned, broken, begins
        self._back = WayBack()
        self._is_half = any(weight.dtype in HALF_DTYPES for module in called for weight in module.parameters())
        for number, module in enumerate(called):
            self._wrap(module, () if len(called) == 1 else (number,))

    def undo(self) -> None:
        """Takes the calls back; a policy is undone after that."""
        self._back.go()

    def _wrap(self, module: nn.Module, before: tuple[int, ...]) -> None:
        held = vars(module)
        # Accelerate puts autocast of its own around the class's forward pass
        original = getattr(held.get("_original_forward"), "__func__", None)
        accelerates = held.get("forward") if original is type(module).forward else None

        def put_back() -> None:
            held.pop(_CALLED, None)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._begins():
                return module(*args, **kwargs)
            put_back()  # the model is called within, and is to run itself
            if accelerates is not None:
                del held["forward"]
            try:
                return self._called(*before, *args, **kwargs)
            except Exception as error:
                if self._broken is None:
                    raise
                failure = error.with_traceback(None)
            finally:
                held[_CALLED] = call
                if accelerates is not None:
                    held["forward"] = accelerates
            self._broken(failure)
            return module(*args, **kwargs)  # under the policy that is in place by now

        held[_CALLED] = call
        self._back.add(put_back)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        tuned = self._tuned
        if tuned.policy.autocast == "off" and not self._is_half:  # who casts inputs expects autocast within
            args, kwargs = map_tensors(_in_fp32, (args, kwargs))
        with as_policys(tuned.autocast()):
            args, kwargs = tuned.batch((args, kwargs))
            with nullcontext() if tuned.policy.compile == "off" else autocast_as_it_is():
                returned = tuned.model(*args, **kwargs)
        return returned if tuned.policy.autocast == "off" else map_tensors(_in_fp32, returned)


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor
