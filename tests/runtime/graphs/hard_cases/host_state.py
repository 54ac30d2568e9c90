"""State of the host: the forward pass reads or changes it, where an inspection may not reach."""

from __future__ import annotations

import array
import contextvars
import ctypes
import itertools
import random
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import setitem
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .case import EVENT_AT, HIDDEN, LATER, STEPS, Cases, Net, Training, Why, fading, loss_of

GLOBALS: dict[str, Any] = {"calls": 0, "gain": 1.0, "raises": False}
CALLS: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
GAIN: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)
NEW: int
ELSEWHERE = types.ModuleType("elsewhere")
exec("calls = 0\ndef count():\n    global calls\n    calls += 1\n    return calls", vars(ELSEWHERE))  # noqa: S102


class Slots:
    __slots__ = ("__private", "gain", "generator")

    def __init__(self) -> None:
        self.gain, self.generator, self.__private = 1.0, random.Random(0), 0

    def count(self) -> int:
        self.__private += 1
        return self.__private


@dataclass(frozen=True)
class Frozen:
    gain: float = 1.0
    calls: int = 0


@dataclass
class Settings:
    """Stands for a configuration object, or a trainer."""

    gain: float = 1.0
    calls: int = 0
    inner: dict[str, float] = field(default_factory=lambda: {"gain": 1.0})
    frozen: Frozen = field(default_factory=Frozen)
    others: dict[int, Slots] = field(default_factory=lambda: {1: Slots()})

    @property
    def of_other(self) -> float:
        return self.others[1].gain


class Items(list[int]):
    calls = 0


class Refusing(dict[str, int]):
    def update(self, *_: Any, **__: Any) -> None:
        raise KeyError("it has no such method")


def box(value: Any) -> types.SimpleNamespace:
    """Returns functions that count, read and write a variable of their closure."""

    def count() -> Any:
        nonlocal value
        value += 1
        return value

    def write(new: Any) -> None:
        nonlocal value
        value = new

    return types.SimpleNamespace(count=count, read=lambda: value, write=write)


def one_more(holder: Any, place: Any) -> int:
    """Adds one to an item or, by a name in an object, to an attribute, and returns it."""
    if isinstance(holder, (dict, UserDict)) or isinstance(place, int):
        holder[place] += 1
        return int(holder[place])
    object.__setattr__(holder, place, getattr(holder, place) + 1)
    return int(getattr(holder, place))


def counted(calls: list[int] = [0]) -> int:  # noqa: B006  # the very subject
    """Counts in a mutable default, an attribute of the function, and a global that was not there."""
    global NEW
    NEW = 1 + (NEW if "NEW" in globals() else 0)
    calls[0] += 1
    vars(counted)["calls"] = vars(counted).get("calls", 0) + 1
    return (calls[0] + int(vars(counted)["calls"]) + NEW) // 3


def forget_counted() -> None:
    (counted.__defaults__ or ([],))[0][:] = [0]
    vars(counted).clear()
    globals().pop("NEW", None)


@lru_cache(maxsize=1)
def cached_stage(number: int) -> dict[str, int]:
    return {"calls": number}


cached_half = lru_cache(maxsize=1)(lambda _: 0.5)


class New:
    calls: int


def of_class() -> int:
    """Counts in an attribute of a class that was not there."""
    New.calls = getattr(New, "calls", 0) + 1
    return New.calls


def forget_class(_: Training) -> None:
    if "calls" in vars(New):
        del New.calls


def turned(held: Any) -> int:
    """Moves the first of a dictionary to its end."""
    first = next(iter(held))
    held[first] = held.pop(first)
    return int(first)


def of_bytes(held: Any) -> int:
    items, number, data = held
    items[0] += 1
    number.value += 1
    data[0] += 1
    return int(items[0] + number.value + data[0]) // 3


def new_attributes(held: Any) -> int:
    held.__dict__ = {**vars(held), "calls": held.calls + 1}
    return int(held.calls)


case = Cases("host state")


def gain(name: str, hold: Callable[[], Any], read: Callable[[Any], Any], change: Any = None, **options: Any) -> None:
    """Adds a model whose hidden state is multiplied by a number of the host."""
    case.holding(name, hold, lambda held, _: read(held), change, **options)


def counts(
    place: str, hold: Callable[[], Any], count: Callable[[Any], int], why: str = Why.EFFECT, **more: Any
) -> None:
    gain(f"counts_in_{place}", hold, lambda held: fading(count(held)), why=why, **more)


counts("closure", lambda: box(0), lambda held: held.count())
counts("callable", lambda: partial(one_more, Settings(), "calls"), lambda held: held())
counts("attribute", Settings, lambda held: one_more(held, "calls"), Why.AGAIN)
counts("private_slot", lambda: [Slots()], lambda held: held[0].count())
counts("frozen", lambda: [Frozen()], lambda held: one_more(held[0], "calls"))
counts("new_dictionary_of_attributes", lambda: [Settings()], lambda held: new_attributes(held[0]))
counts("dictionary", lambda: {"calls": 0}, lambda held: one_more(held, "calls"), Why.AGAIN)
counts("user_dict", lambda: UserDict({"calls": 0}), lambda held: one_more(held, "calls"))
counts("dictionary_that_refuses_update", lambda: [Refusing(n=0)], lambda held: one_more(held[0], "n"))
counts("attribute_of_list", lambda: [Items()], lambda held: one_more(held[0], "calls"))
counts("order_of_dictionary", lambda: [{1: 1, 2: 2, 3: 3}], lambda held: turned(held[0]))
counts("order_of_ordered_dictionary", lambda: [OrderedDict({1: 1, 2: 2})], lambda held: turned(held[0]))
counts("length_of_list", list, lambda held: held.append(1.0) or len(held), Why.AGAIN)
# A number of ctypes is not put back after the pass is recorded.
counts("bytes", lambda: (array.array("i", [0]), ctypes.c_int(0), bytearray(1)), of_bytes, ends=True)
counts("long_list", lambda: [0] * 5000, lambda held: one_more(held, -1))
counts("deep_lists", lambda: [[[[[[{"n": 0}]]]]]], lambda held: one_more(held[0][0][0][0][0][0], "n"))
counts("array", lambda: [np.zeros((2, 2))], lambda held: int(np.add(held[0], 1, out=held[0])[0, 0]))
counts("itertools_count", lambda: partial(next, itertools.count()), lambda held: held(), Why.ITERATOR)
counts("function", forget_counted, lambda _: counted())
counts("cache", cached_stage.cache_clear, lambda _: one_more(cached_stage(0), "calls"))
counts("global", lambda: GLOBALS.update(calls=0), lambda _: one_more(GLOBALS, "calls"))
counts("module_elsewhere", lambda: setattr(ELSEWHERE, "calls", 0), lambda _: ELSEWHERE.count())
counts("context_variable", lambda: CALLS.set(0), lambda _: CALLS.set(CALLS.get() + 1) and CALLS.get())
counts("class", list, lambda _: of_class(), event=forget_class, at=(0, 1))
gain("cache_fills", list, lambda _: cached_half(object()), why=Why.EFFECT)
gain("iterator_advances", lambda: itertools.cycle([1.0, 0.5, 0.25]), next, why=Why.ITERATOR)
gain("generator_of_python", list, lambda _: 0.5 + random.random(), why=Why.DRAWS)
gain("generator_of_numpy", list, lambda _: 0.5 + float(np.random.rand()), why=Why.DRAWS)
gain("generator_of_torch", list, lambda _: 0.5 + float(torch.rand((), device="cpu")), why=Why.DRAWS)
gain("own_generator_of_python", Slots, lambda held: 0.5 + held.generator.random(), why=Why.EFFECT)
gain("own_generator_of_numpy", lambda: [np.random.default_rng(0)], lambda held: 0.5 + held[0].random(), why=Why.EFFECT)
gain("own_generator_of_torch", torch.Generator, lambda held: torch.rand((), generator=held).item(), why=Why.EFFECT)


# --- tensors that the forward pass keeps ---------------------------------------------------------------------------


def keeps(name: str, hold: Any, keep: Callable[[Any, Tensor], Any], read: Any = None, why: str = Why.AGAIN) -> None:
    """Adds a model that keeps a part of its hidden state; the loss adds what `read` makes of that, if it is given."""

    def forward(own: Any, x: Tensor) -> Tensor:
        hidden = own.hidden(x)
        seen = keep(own.held, hidden)
        return own.head(seen if isinstance(seen, Tensor) else hidden)

    def loss(t: Training, x: Tensor, y: Tensor) -> Tensor:
        own = loss_of(t.called(x), y)
        return own if read is None else own + read(t.model.held)

    case(name, build=lambda own: setattr(own, "held", hold()), forward=forward, loss=loss, why=why)


def with_memory(held: list[Tensor], hidden: Tensor) -> Tensor:
    before = held.pop() if held else hidden.detach()
    held.append(hidden.detach())
    return hidden + 0.5 * before


COLLECTED: list[Tensor] = []
keeps("losses_in_list", lambda: [[]], lambda held, h: held[0].append(h.mean()), lambda held: held[0].pop(), Why.EFFECT)
keeps(
    "losses_in_global", COLLECTED.clear, lambda _, h: COLLECTED.append(h.mean()), lambda _: COLLECTED.pop(), Why.EFFECT
)
keeps("metrics_in_dict", dict, lambda held, h: held.update(a=h.mean()), lambda held: held["a"].detach())
keeps("memory_of_last_pass", list, with_memory)
keeps("memory_in_closure", lambda: partial(with_memory, []), lambda held, h: held(h), why=Why.ELSEWHERE)


# --- what is changed from outside ----------------------------------------------------------------------------------


def changed(
    name: str, hold: Callable[[], Any], read: Callable[[Any], Any], change: Any, why: str = Why.DIFFERS
) -> None:
    gain(f"{name}_changed", hold, read, change, why=why)


changed("settings", Settings, lambda held: held.gain, lambda held: setattr(held, "gain", 0.25), "")
changed("inner_settings", Settings, lambda held: held.inner["gain"], lambda held: setitem(held.inner, "gain", 0.25))
changed("frozen", Settings, lambda held: held.frozen.gain, lambda held: setattr(held, "frozen", Frozen(0.25)), "")
changed("property", Settings, lambda held: held.of_other, lambda held: setattr(held.others[1], "gain", 0.25))
changed("slots", Slots, lambda held: held.gain, lambda held: setattr(held, "gain", 0.25))
changed("closure", lambda: box(1.0), lambda held: held.read(), lambda held: held.write(0.25))
changed("global", lambda: GLOBALS.update(gain=1.0), lambda _: GLOBALS["gain"], lambda _: GLOBALS.update(gain=0.25))
changed("array", lambda: np.ones(1), lambda held: float(held[0]), lambda held: setitem(held, 0, 0.25))
changed("long_list", lambda: [1.0] * 5000, lambda held: held[-1], lambda held: setitem(held, -1, 0.25))
changed("table", lambda: {"f": 1.0, "g": 1.0}, lambda held: held["f"], lambda held: held.update(f=0.25), "")
changed("list", lambda: [1.0], lambda held: 1 / len(held), lambda held: held.append(1.0), "")
gain(
    "settings_change_again_and_again",
    Settings,
    lambda held: held.gain,
    lambda held: setattr(held, "gain", held.gain * 0.9),
    at=range(2, STEPS, 2),
    why=Why.AGAIN,
)


def equal(before: Any, after: Any) -> None:
    """Changes a value to one that is equal, and not the same."""
    kept = types.SimpleNamespace
    read = lambda held: 1.0 if repr(held.value) == repr(before) else 0.25  # noqa: E731
    changed(f"equal_{before!r}", lambda: kept(value=before), read, lambda held: setattr(held, "value", after), "")


equal(2, 2.0)
equal(True, 1)
equal(0.0, -0.0)
equal((2, 3), (2.0, 3))


class Gained(Net):
    """Its gain may be a setting of its class, or of its context."""

    factor = 1.0

    def forward(self, x: Tensor) -> Any:
        return self.head(functional.silu(self.body(x))) * self.factor * GAIN.get()


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    vars(module)["forward"] = types.MethodType(forward, module)


def set_context(t: Training) -> None:
    t.undo.callback(GAIN.reset, GAIN.set(fading(t.number)))


def set_code(t: Training) -> None:
    """Changes the class's function itself, as a notebook's reload does."""
    forward: Any = Gained.forward
    t.undo.callback(setattr, forward, "__code__", forward.__code__)
    forward.__code__ = (lambda self, x: self.head(torch.sin(self.body(x)))).__code__


gained = partial(case, model=Gained)
gained("attribute_of_class_changed", event=lambda t: t.patch(Gained, "factor", 0.25))
gained("method_of_class_changed", event=lambda t: t.patch(Gained, "forward", lambda self, x: self.logits(x)))
gained("forward_set_on_instance", event=lambda t: set_forward(t.model, lambda self, x: self.logits(x) * 0.25))
gained("forward_of_layer_set", event=lambda t: set_forward(t.model.head, lambda self, x: x @ self.weight.t() * 0.25))
gained("class_set", event=lambda t: setattr(t.model, "__class__", Net))
gained("function_of_torch_replaced", event=lambda t: t.patch(functional, "silu", torch.sin), why=Why.DIFFERS)
gained("code_of_function_replaced", event=set_code, why=Why.DIFFERS)
gained("context_changed", event=set_context, why=Why.DIFFERS)


branch = Cases("branches")
branch("by_weight", forward=lambda own, x: own.logits(x if own.head.weight.sum() > 0 else -x), on_cpu=None)


class ByMode(Net):
    def forward(self, x: Tensor, mode: Any = "plain", mask: Tensor | None = None, **others: Any) -> Any:
        hidden = self.hidden(x) * {float: 0.5, bool: 0.25}.get(type(mode), 1.0)
        return self.head(hidden if mask is None else hidden * mask) * (1 + len(others))


def given(name: str, arguments: Callable[[Training, Tensor], dict[str, Any]], why: str = "", **options: Any) -> None:
    branch(name, model=ByMode, loss=lambda t, x, y: loss_of(t.called(x, **arguments(t, x)), y), why=why, **options)


given("mask_at_some_steps", lambda t, x: {"mask": (x[0, 0] * 0).repeat(HIDDEN)} if t.number % 4 == 3 else {})
given("keyword", lambda *_: {"more": None}, when=LATER)
given("step_as_argument", lambda t, _: {"step": t.number}, Why.SILENT)
given("object_as_argument", lambda *_: {"other": object()}, Why.SILENT)
given("equal_argument", lambda t, _: {"mode": (2, 2.0)[t.is_late]})


def gradients_stay(t: Training) -> Tensor:
    """Keeps gradients between steps, or zeros in their place from a step on."""
    loss = t.loss()
    loss.backward()
    t.optimizer.step()
    t.optimizer.zero_grad(set_to_none=not t.is_late)
    return loss.detach()


def by_gradient(own: Any, x: Tensor) -> Any:
    return own.logits(x) * (1.0 if own.head.weight.grad is None else 0.5)


branch("by_gradient", forward=by_gradient)
branch("by_gradient_that_stays", forward=by_gradient, step=gradients_stay, why=Why.DIFFERS, ends=False)


def raises_if_told(own: Any, x: Tensor) -> Any:
    hidden = own.hidden(x)
    if GLOBALS["raises"]:
        raise KeyError("lost")
    return own.head(hidden)


@branch.step(forward=raises_if_told, why=Why.RAISES)
def forward_raises_while_recorded(t: Training) -> Tensor:
    """The pass that would be recorded raises half way; those that follow do not."""
    GLOBALS["raises"] = t.number in (1, EVENT_AT)
    try:
        return t.plain()
    except KeyError:
        return torch.full((), -1.0)
    finally:
        GLOBALS["raises"] = False
