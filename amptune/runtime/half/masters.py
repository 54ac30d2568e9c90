"""An optimizer of half weights that updates FP32 masters in their place.

During a step, and while a state is loaded, the optimizer's groups hold the masters. Otherwise they hold the model's own
parameters, so that clipping, zero_grad(), schedulers and loss scalers work as usual, also after a step that raised.
Gradients are the parameters' own, in FP32; the state is in FP32 too, since it is made for masters.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import defaultdict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from amptune.errors import PolicyApplyError
from amptune.runtime.half.weights import HALF

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from amptune.runtime.half.weights import HalfWeights, HeldWeight

__all__ = ["MasterWeights", "parameters_of", "require_unrounded_state", "state_in"]

# The state of an optimizer, by parameter; an entry is made when it is first asked for.
State = defaultdict[Any, Any]


class MasterWeights:
    """The masters of one optimizer, until `remove`. Raises `PolicyApplyError` for one that cannot have any."""

    def __init__(self, held: HalfWeights, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PolicyApplyError(
                "LBFGS runs the model within its step, and so cannot have master weights: use another optimizer, or a "
                "policy without master_weights"
            )
        self._held = held
        self._is_lent = False
        self._own: list[list[nn.Parameter]] = []
        self._lent: list[list[nn.Parameter]] = []
        self._weights: list[HeldWeight] = []
        self._own_state: State = defaultdict(dict)
        self._lent_state: State = defaultdict(dict)
        after_step = optimizer.register_step_post_hook(self._after_step)
        # An optimizer of several models has masters of each: the masters lent last are taken back first.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(after_step.id, last=False)
        self._handles: list[RemovableHandle] = [
            after_step,
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._before_loading),
            optimizer.register_load_state_dict_post_hook(self.take_back, prepend=True),
        ]
        optimizer.step = step = _recovering(optimizer)  # type: ignore[method-assign]
        self._step = weakref.ref(step)

    @contextmanager
    def lent(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Makes the optimizer hold the masters within the context."""
        self._lend(optimizer)
        try:
            yield
        finally:
            self.take_back(optimizer)

    def remove(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends the use of masters: the optimizer continues with the model's own parameters and its present state."""
        self.take_back(optimizer)
        for handle in self._handles:
            handle.remove()
        own: dict[str, Any] = vars(optimizer)
        if "step" in own and own["step"] is self._step():  # a scheduler made later may hold it
            step: Any = own["step"]
            if step.former is None:
                del own["step"]
            else:
                own["step"] = step.former

    def recover(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends a step that raised: the weights become the masters as far as the step came, rounded."""
        if self._is_lent:
            self._after_step(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._lend(optimizer)
        if closure is None:
            return None
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], self._with_own_parameters(optimizer, closure)), rest

    def _with_own_parameters(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._held.refresh(self._weights)  # a step may change weights before it calls the closure, as SAM does
            self._clear_with_masters()
            self.take_back(optimizer)
            loss = closure()
            self._lend(optimizer)
            return loss

        return run

    def _clear_with_masters(self) -> None:
        """Clears the gradients of weights whose masters' gradients the step has cleared."""
        for weight in self._weights:
            if weight.fp32.grad is None:
                weight.half.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.take_back(optimizer)
        self._held.round(self._weights)

    def _before_loading(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        saved = [len(group["params"]) for group in state.get("param_groups", ())]
        if saved == [len(group["params"]) for group in optimizer.param_groups]:  # else PyTorch refuses to load it
            self._lend(optimizer)

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        self.take_back(optimizer)  # steps within steps lend twice
        if not _are_the_same(self._own, [group["params"] for group in optimizer.param_groups]):
            self._learn(optimizer)
        self._held.refresh(self._weights)
        for weight in self._weights:
            gradient = weight.half.grad
            if gradient is not None and gradient.dtype is HALF:
                gradient = gradient.float()
            weight.fp32.grad = gradient
        self._is_lent = True
        for group, masters in zip(optimizer.param_groups, self._lent, strict=True):
            group["params"] = masters
        self._own_state = optimizer.state
        if not _share_values(self._own_state, self._lent_state):
            self._lent_state = self._rekeyed(self._own_state, to_masters=True)
        optimizer.state = self._lent_state

    def take_back(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Makes the optimizer hold the model's own parameters again, if it holds masters."""
        if not self._is_lent:
            return
        for group, parameters in zip(optimizer.param_groups, self._own, strict=True):
            group["params"] = list(parameters)
        for weight in self._weights:
            weight.fp32.grad = None
        self._lent_state = optimizer.state
        if not _share_values(self._own_state, self._lent_state):
            self._own_state = self._rekeyed(self._lent_state, to_masters=False)
        optimizer.state = self._own_state
        self._is_lent = False

    def _learn(self, optimizer: torch.optim.Optimizer) -> None:
        """Finds the optimizer's parameters and their masters, again if a group was added."""
        self._own = [list(group["params"]) for group in optimizer.param_groups]
        found = (self._held.with_master(parameter) for group in self._own for parameter in group)
        self._weights = [weight for weight in found if weight is not None]
        masters = {id(weight.half): weight.fp32 for weight in self._weights}
        self._lent = [[masters.get(id(parameter), parameter) for parameter in group] for group in self._own]
        self._lent_state = defaultdict(dict)
        state_in(torch.float32, optimizer, self._held)  # Adagrad makes its state when built, in half like the weights

    def _rekeyed(self, state: State, *, to_masters: bool) -> State:
        """Returns the state keyed by masters instead of parameters, or the other way round."""
        pairs = [(weight.half, weight.fp32) for weight in self._weights]
        becomes = {id(half): master for half, master in pairs} if to_masters else {id(m): half for half, m in pairs}
        return defaultdict(dict, {becomes.get(id(key), key): value for key, value in state.items()})


def _recovering(optimizer: torch.optim.Optimizer) -> Any:
    """Returns the optimizer's `step`, but one that takes the masters back if it raises: PyTorch has no hook for that.

    It is made as PyTorch's schedulers make theirs, which may wrap it or be wrapped, and does not hold the optimizer.
    """
    former: Any = vars(optimizer).get("step")
    of: Any = weakref.ref(optimizer)

    @functools.wraps(former or type(optimizer).step)
    def recovering(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return type(optimizer).step(optimizer, *args, **kwargs) if former is None else former(*args, **kwargs)
        except BaseException:
            with suppress(RuntimeError):  # of a failed device, whose weights are lost: the step's own error tells
                # In the order of a step that ends well: the masters lent last are taken back first.
                for hook in optimizer._optimizer_step_post_hooks.values():
                    if isinstance(owner := getattr(hook, "__self__", None), MasterWeights):
                        owner.recover(optimizer)
            raise

    step: Any = functools.wraps(recovering)(lambda *args, **kwargs: recovering(of(), *args, **kwargs))
    step.__func__, step.former = recovering, former  # a scheduler takes what a bound method has
    return step


def _are_the_same(some: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> bool:
    """Returns True if both hold identical objects, in the same groups."""
    return list(map(len, some)) == list(map(len, others)) and all(
        one is other for left, right in zip(some, others, strict=True) for one, other in zip(left, right, strict=True)
    )


def _share_values(state: State, other: State) -> bool:
    """Returns True if each parameter's state is one dict object in both, so that both are up to date."""
    return len(state) == len(other) and all(map(operator.is_, state.values(), other.values()))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def require_unrounded_state(optimizer: torch.optim.Optimizer, held: HalfWeights) -> None:
    """Raises `PolicyApplyError` if steps have changed a state in half; at its start a state is constant.

    Widening would not restore what rounding lost: most of AdamW's squares of gradients are 0 in half.
    """
    for parameter, state in optimizer.state.items():
        values = state.values() if parameter in held else ()
        if any(isinstance(value, torch.Tensor) and value.dtype is HALF and _varies(value) for value in values):
            raise PolicyApplyError(
                "the optimizer's state was loaded, or made by steps, before it had master weights, and so was rounded "
                "to half: optimizer = tuned.optimizer(optimizer) first, then optimizer.load_state_dict(…)"
            )


def _varies(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and bool((tensor != tensor.flatten()[0]).any())


def state_in(dtype: torch.dtype, optimizer: torch.optim.Optimizer, held: HalfWeights) -> None:
    """Converts the state of half weights (such as momentum) to `dtype`, FP32 or half, except the count of steps."""
    for parameter, state in optimizer.state.items():
        if parameter in held:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype in (HALF, torch.float32) and name != "step":
                    state[name] = value.to(dtype)
