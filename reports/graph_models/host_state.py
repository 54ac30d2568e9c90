"""Cases whose forward pass reads or changes state of the host, in places that an inspection may not reach."""

from __future__ import annotations

import array
import contextvars
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import random
import threading
import types
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from operator import setitem
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from graph_models.case import (
    EVENT_AT,
    Counter,
    GainNet,
    Net,
    Settings,
    Training,
    add,
    event_case,
    fading,
    loss_case,
    loss_of,
    model_case,
    numbers,
    update,
)

HOST = "host state"
LATE = 20  # a call after which a counter begins to matter


# --- what the forward pass itself advances -------------------------------------------------------------------------


class Held(GainNet):
    """Its gain is what `read` makes of what it holds."""

    def __init__(self, hold: Callable[[], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.read = hold(), read

    def gain(self) -> Any:
        return self.read(self.held)


def gain_case(name: str, hold: Callable[[], Any], read: Callable[[Any], Any]) -> None:
    add(HOST, name, model=functools.partial(Held, hold, read))


def one_more(holder: Any, place: Any) -> int:
    """Adds one to an item or an attribute, and returns it."""
    is_item = hasattr(holder, "__getitem__")
    number: int = (holder[place] if is_item else getattr(holder, place)) + 1
    setitem(holder, place, number) if is_item else setattr(holder, place, number)
    return number


class FadingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: Tensor) -> Tensor:
        self.calls += 1
        return logits.square().mean() * fading(self.calls)


@model_case(HOST)
class LossModuleInDict(Net):
    def build(self) -> None:
        self.losses = {"size": [FadingLoss()]}

    def forward(self, x: Tensor) -> Any:
        return self.losses["size"][0](super().forward(x))


@model_case(HOST)
class LossModuleInClosure(Net):
    def build(self) -> None:
        loss = FadingLoss()
        self.loss = lambda logits: loss(logits)

    def forward(self, x: Tensor) -> Any:
        return self.loss(super().forward(x))


@model_case(HOST)
class ClassAttributeCounts(GainNet):
    calls: ClassVar[int] = 0

    def build(self) -> None:
        type(self).calls = 0

    def gain(self) -> float:
        type(self).calls += 1
        return fading(type(self).calls)


def _counting() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


gain_case("closure_counts", _counting, lambda held: fading(held()))


GLOBALS: dict[str, Any] = {"calls": 0, "gain": 1.0, "wait": False}


@model_case(HOST)
class GlobalCounts(GainNet):
    def build(self) -> None:
        GLOBALS["calls"] = 0

    def gain(self) -> float:
        GLOBALS["calls"] += 1
        return fading(GLOBALS["calls"])


gain_case("numpy_global_generator", list, lambda _: 0.5 + float(np.random.rand()))


@model_case(HOST)
class NumpyGeneratorInClosure(GainNet):
    def build(self) -> None:
        generator = np.random.default_rng(0)
        self.draw = lambda: 0.5 + generator.random()

    def gain(self) -> float:
        return self.draw()


gain_case("python_generator", list, lambda _: 0.5 + random.random())  # noqa: S311


class _Slots:
    __slots__ = ("calls", "gain", "generator")

    def __init__(self) -> None:
        self.calls, self.gain, self.generator = 0, 1.0, random.Random(0)  # noqa: S311


gain_case("python_generator_in_slots", _Slots, lambda held: 0.5 + held.generator.random())
gain_case("counter_in_slots", _Slots, lambda held: fading(one_more(held, "calls")))


@model_case(HOST)
class GeneratorOfTorchInClosure(GainNet):
    def build(self) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        self.draw = lambda: float(torch.rand((), generator=generator, device="cpu"))

    def gain(self) -> float:
        return 0.5 + self.draw()


gain_case("iterator_advances", lambda: itertools.cycle([1.0, 0.5, 0.25]), next)
gain_case("generator_function_advances", lambda: [numbers(1.0, 0.5, 0.25)], lambda held: next(held[0]))
gain_case("itertools_count_in_default", lambda: functools.partial(next, itertools.count()), lambda held: fading(held()))


@model_case(HOST)
class AttributeCounts(GainNet):
    def build(self) -> None:
        self.calls = 0

    def gain(self) -> float:
        self.calls += 1
        return fading(self.calls)


# Its counter is where inspection does not look, and changes nothing at first.
gain_case("counter_matters_late", _counting, lambda held: 0.25 if held() > LATE else 1.0)


@model_case(HOST)
class TemperatureFalls(GainNet):
    def build(self) -> None:
        self.temperature = 2.0

    def gain(self) -> float:
        self.temperature = max(0.5, self.temperature * 0.95)
        return 1 / self.temperature


@model_case(HOST)
class MutableDefault(GainNet):
    def build(self) -> None:
        (calls,) = vars(type(self))["counted"].__defaults__
        calls.clear()

    def counted(self, calls: list[int] = []) -> int:  # noqa: B006  # its trouble
        calls.append(1)
        return len(calls)

    def gain(self) -> float:
        return fading(self.counted())


def _stage() -> float:
    vars(_stage)["calls"] += 1
    return fading(vars(_stage)["calls"])


@model_case(HOST)
class FunctionAttributeCounts(GainNet):
    def build(self) -> None:
        vars(_stage)["calls"] = 0

    def gain(self) -> float:
        return _stage()


gain_case("array_changes_in_place", lambda: np.ones(2), lambda held: float(np.multiply(held, 0.95, out=held)[0]))


@model_case(HOST)
class BytesOfTheHost(GainNet):
    """A counter in an array, one in ctypes, and one in a bytearray."""

    def build(self) -> None:
        self.kept = (array.array("i", [0]), ctypes.c_int(0), bytearray(1))

    def gain(self) -> float:
        items, number, data = self.kept
        items[0] += 1
        number.value += 1
        data[0] += 1
        return fading((items[0] + number.value + data[0]) // 3)


class _Stages(Mapping[str, float]):
    """A mapping of its own kind, which counts how often it was read."""

    def __init__(self) -> None:
        self._reads = itertools.count()

    def __getitem__(self, key: str) -> float:
        return fading(next(self._reads))

    def __iter__(self) -> Iterator[str]:
        return iter(("gain",))

    def __len__(self) -> int:
        return 1


gain_case("mapping_of_its_own", _Stages, lambda held: held["gain"])
gain_case("user_dict_counts", lambda: UserDict({"calls": 0}), lambda held: fading(one_more(held, "calls")))


# Deeper than an inspection goes.
gain_case(
    "deep_in_lists", lambda: [[[[[[{"calls": 0}]]]]]], lambda held: fading(one_more(held[0][0][0][0][0][0], "calls"))
)


# Longer than an inspection reads.
gain_case("long_list_changes", lambda: [0] * 5000, lambda held: fading(one_more(held, -1)))


CALLS: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
GAIN: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)


@model_case(HOST)
class ContextVariableCounts(GainNet):
    def build(self) -> None:
        CALLS.set(0)

    def gain(self) -> float:
        CALLS.set(CALLS.get() + 1)
        return fading(CALLS.get())


@functools.lru_cache(maxsize=1)
def _cached_stage(number: int) -> list[float]:
    return [1.0 + number]


@model_case(HOST)
class CacheHoldsState(GainNet):
    """What a cache holds is changed by each pass."""

    def build(self) -> None:
        _cached_stage.cache_clear()

    def gain(self) -> float:
        held = _cached_stage(0)
        held[0] *= 0.95
        return held[0]


# --- tensors that the forward pass keeps ---------------------------------------------------------------------------


def _with_its_loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x), y) + training.model.aux


@model_case(HOST, loss=_with_its_loss)
class LossKeptInAttribute(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        self.aux = hidden.square().mean()
        return self.head(hidden)


def _with_listed_losses(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(training.called(x), y)
    loss = loss + torch.stack(training.model.losses).sum()
    training.model.losses.clear()
    return loss


@model_case(HOST, loss=_with_listed_losses)
class LossesInList(Net):
    def build(self) -> None:
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        self.losses.append(hidden.square().mean())
        return self.head(hidden)


COLLECTED: list[Tensor] = []


def _with_collected_losses(training: Training, x: Tensor, y: Tensor) -> Tensor:
    COLLECTED.clear()
    loss = loss_of(training.called(x), y)
    return loss + sum(COLLECTED)


@model_case(HOST, loss=_with_collected_losses)
class LossesInGlobalList(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        COLLECTED.append(hidden.square().mean())
        return self.head(hidden)


gain_case("list_grows", list, lambda held: fading(held.append(1.0) or len(held)))


@model_case(HOST)
class DequeOfMeans(Net):
    """Normalizes by what the last batches measured."""

    def build(self) -> None:
        self.means: deque[Tensor] = deque(maxlen=4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        self.means.append(hidden.detach().abs().mean())
        return self.head(hidden / torch.stack(tuple(self.means)).mean())


@model_case(HOST)
class MemoryOfLastPass(Net):
    """Reads what its last pass left, as Transformer-XL does."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        seen = hidden if self.memory is None else hidden + 0.5 * self.memory
        self.memory = hidden.detach()
        return self.head(seen)


@model_case(HOST)
class MemoryInClosure(Net):
    def build(self) -> None:
        memory: list[Tensor] = []

        def seen(hidden: Tensor) -> Tensor:
            before = memory.pop() if memory else hidden.detach()
            memory.append(hidden.detach())
            return hidden + 0.5 * before

        self.seen = seen

    def forward(self, x: Tensor) -> Any:
        return self.head(self.seen(self.hidden(x)))


def _reading_metrics(training: Training) -> Tensor:
    x, y = training.batch()
    loss = update(training, loss_of(training.called(x), y))
    return torch.stack([loss, training.model.metrics["size"].detach()])


@model_case(HOST, step=_reading_metrics)
class MetricsInDict(Net):
    """Leaves a metric in a dictionary, which the loop reads."""

    def build(self) -> None:
        self.metrics: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        self.metrics["size"] = hidden.abs().mean()
        return self.head(hidden)


# --- what is changed from outside ----------------------------------------------------------------------------------


class GlobalGain(GainNet):
    def gain(self) -> Any:
        return GLOBALS["gain"]


add(HOST, "global_changed", model=GlobalGain, event=lambda t: t.patch(GLOBALS, "gain", 0.25))


class ClassGain(GainNet):
    factor: float = 1.0

    def gain(self) -> Any:
        return self.factor


add(HOST, "class_attribute_changed", model=ClassGain, event=lambda t: t.patch(type(t.model), "factor", 0.25))


@event_case(HOST, model=ClassGain)
def base_class_method_changed(training: Training) -> None:
    training.patch(GainNet, "forward", lambda self, x: Net.forward(self, x) * 0.25)


@event_case(HOST, model=ClassGain)
def forward_set_on_instance(training: Training) -> None:
    model = training.model
    vars(model)["forward"] = lambda x: Net.forward(model, x) * 0.25


@event_case(HOST, model=Net)
def forward_of_layer_set(training: Training) -> None:
    head = training.model.head
    vars(head)["forward"] = types.MethodType(lambda self, x: 0.25 * functional.linear(x, self.weight), head)


class _OtherNet(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 0.25


add(HOST, "class_set", model=Net, event=lambda t: setattr(t.model, "__class__", _OtherNet))


class _OtherLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.25


add(HOST, "class_of_layer_set", model=Net, event=lambda t: setattr(t.model.head, "__class__", _OtherLinear))


def _boxed(value: float) -> tuple[Callable[[], float], Callable[[float], None]]:
    def read() -> float:
        return value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


class ClosureGain(GainNet):
    def build(self) -> None:
        self.read, self.write = _boxed(1.0)

    def gain(self) -> Any:
        return self.read()


add(HOST, "closure_changed", model=ClosureGain, event=lambda t: t.model.write(0.25))


class SlotsGain(GainNet):
    def build(self) -> None:
        self.state = _Slots()

    def gain(self) -> Any:
        return self.state.gain


add(HOST, "slots_changed", model=SlotsGain, event=lambda t: setattr(t.model.state, "gain", 0.25))


class ContextGain(GainNet):
    def gain(self) -> Any:
        return GAIN.get()


@event_case(HOST, model=ContextGain)
def context_variable_changed(training: Training) -> None:
    token = GAIN.set(0.25)
    training.undo.callback(GAIN.reset, token)


@loss_case(HOST, model=ContextGain)
def context_variable_each_step(training: Training, x: Tensor, y: Tensor) -> Tensor:
    token = GAIN.set(fading(training.number))
    try:
        return loss_of(training.called(x), y)
    finally:
        GAIN.reset(token)


class EnvironmentGain(GainNet):
    def gain(self) -> Any:
        return float(os.environ.get("GRAPH_CASES_GAIN", "1"))


@event_case(HOST, model=EnvironmentGain)
def environment_changed(training: Training) -> None:
    os.environ["GRAPH_CASES_GAIN"] = "0.25"
    training.undo.callback(os.environ.pop, "GRAPH_CASES_GAIN")


class ThreadLocalGain(GainNet):
    def build(self) -> None:
        self.local = threading.local()
        self.local.gain = 1.0

    def gain(self) -> Any:
        return self.local.gain


add(HOST, "thread_local_changed", model=ThreadLocalGain, event=lambda t: setattr(t.model.local, "gain", 0.25))


@dataclasses.dataclass(frozen=True)
class _Frozen:
    gain: float = 1.0


class SettingsGain(GainNet):
    def build(self) -> None:
        self.settings, self.frozen = Settings(), _Frozen()
        self.space = types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.0))
        self.array = np.ones(1)
        self.many = [1.0] * 5000

    def gain(self) -> Any:
        gains = (self.settings.gain, self.settings.inner["gain"], self.frozen.gain, self.space.inner.gain)
        return math.prod(gains) * float(self.array[0]) * self.many[-1]


add(HOST, "settings_changed", model=SettingsGain, event=lambda t: setattr(t.model.settings, "gain", 0.25))
add(HOST, "inner_settings_changed", model=SettingsGain, event=lambda t: setitem(t.model.settings.inner, "gain", 0.25))


@event_case(HOST, model=SettingsGain)
def frozen_settings_replaced(training: Training) -> None:
    training.model.frozen = dataclasses.replace(training.model.frozen, gain=0.25)


@event_case(HOST, model=SettingsGain)
def namespace_in_namespace_changed(training: Training) -> None:
    training.model.space.inner.gain = 0.25


add(HOST, "array_changed", model=SettingsGain, event=lambda t: setitem(t.model.array, 0, 0.25))
add(HOST, "end_of_long_list_changed", model=SettingsGain, event=lambda t: setitem(t.model.many, -1, 0.25))


@event_case(HOST, model=SettingsGain, at=range(3, 40, 3))
def settings_change_again_and_again(training: Training) -> None:
    training.model.settings.gain = fading(training.number)


class _Trainer:
    epoch = 0


class ReadsTrainer(GainNet):
    """Knows its trainer by a weak reference, and reads its epoch."""

    def build(self) -> None:
        trainer = _Trainer()
        weakly = weakref.ref(trainer)
        GLOBALS["trainer"] = trainer
        self.epoch = lambda: weakly().epoch  # type: ignore[union-attr]

    def gain(self) -> Any:
        return fading(10 * self.epoch())


@event_case(HOST, model=ReadsTrainer, at=(12, 24))
def epoch_of_trainer(_: Training) -> None:
    GLOBALS["trainer"].epoch += 1


class ReadsOwner(GainNet):
    """Its gain is a property of an object beside it."""

    def build(self) -> None:
        self.owner = _Owner()

    def gain(self) -> Any:
        return self.owner.gain


class _Owner:
    def __init__(self) -> None:
        self._others = {1: Settings()}

    @property
    def gain(self) -> float:
        return self._others[1].gain


add(HOST, "property_changed", model=ReadsOwner, event=lambda t: setattr(t.model.owner._others[1], "gain", 0.25))


class ReadsDrawer(GainNet):
    """Has it from a bound method of an object that it does not hold itself."""

    def build(self) -> None:
        owner = _Owner()
        GLOBALS["owner"] = owner
        self.read = functools.partial(getattr, owner, "gain")

    def gain(self) -> Any:
        return self.read()


@event_case(HOST, model=ReadsDrawer)
def argument_of_partial_changed(_: Training) -> None:
    GLOBALS["owner"]._others[1].gain = 0.25


class SiluNet(Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(functional.silu(self.body(x)))


add(HOST, "function_of_torch_replaced", model=SiluNet, event=lambda t: t.patch(functional, "silu", torch.sin))


class NamedActivation(Net):
    def build(self) -> None:
        self.activations = {"tanh": torch.tanh, "sin": torch.sin}
        self.name = "tanh"

    def forward(self, x: Tensor) -> Any:
        return self.head(self.activations[self.name](self.body(x)))


add(HOST, "name_changed", model=NamedActivation, event=lambda t: setattr(t.model, "name", "sin"))


@event_case(HOST, model=NamedActivation)
def entry_of_table_replaced(training: Training) -> None:
    training.model.activations["tanh"] = torch.sin


@event_case(HOST, model=SiluNet)
def code_of_function_replaced(training: Training) -> None:
    """Changes the class's function itself, as a notebook's reload does."""
    forward: Any = SiluNet.forward
    training.undo.callback(setattr, forward, "__code__", forward.__code__)
    forward.__code__ = (lambda self, x: self.head(torch.sin(self.body(x)))).__code__


# --- values that are equal and not the same ------------------------------------------------------------------------


class Power(GainNet):
    """Treats 2 and 2.0, 1 and True, 0.0 and -0.0 as different."""

    def build(self) -> None:
        self.power: Any = 2
        self.flag: Any = True
        self.zero = 0.0
        self.pair: Any = (2, 3)

    def gain(self) -> Any:
        whole = isinstance(self.power, int) and isinstance(self.pair[0], int)
        return (1.0 if whole else 0.25) * (1.0 if self.flag is True else 0.5) * math.copysign(1.0, self.zero)


add(HOST, "two_becomes_float", model=Power, event=lambda t: setattr(t.model, "power", 2.0))
add(HOST, "true_becomes_one", model=Power, event=lambda t: setattr(t.model, "flag", 1))
add(HOST, "zero_becomes_negative", model=Power, event=lambda t: setattr(t.model, "zero", -0.0))
add(HOST, "two_in_tuple_becomes_float", model=Power, event=lambda t: setattr(t.model, "pair", (2.0, 3)))


class PowerGiven(Net):
    def forward(self, x: Tensor, power: Any) -> Any:
        negative = math.copysign(1.0, power) < 0
        gain = 0.5 if negative else {bool: 0.25, int: 1.0, float: 2.0}[type(power)]
        return super().forward(x) * gain


def _given(before: Any, after: Any) -> Any:
    def loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(training.called(x, before if training.number < EVENT_AT else after), y)

    return loss


add(HOST, "two_as_argument", model=PowerGiven, loss=_given(2, 2.0))
add(HOST, "true_as_argument", model=PowerGiven, loss=_given(True, 1))
add(HOST, "zero_as_argument", model=PowerGiven, loss=_given(0.0, -0.0))


gain_case("callable_counts", Counter, lambda held: fading(held()))


# A value that does not equal itself, and that nothing uses.
add(HOST, "not_a_number_in_attribute", model=SettingsGain, event=lambda t: setattr(t.model, "best", math.nan))
