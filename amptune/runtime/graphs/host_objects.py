"""Reads the state inside Python objects that a forward pass may change, and puts it back."""

from __future__ import annotations

import dis
import functools
import gc
import io
import pickle
import random
import sys
import weakref
from array import array
from collections import OrderedDict, deque
from contextlib import suppress
from contextvars import ContextVar
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amptune.runtime.graphs.model_state import FOREIGN, changed_keys, is_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["ITERATOR", "content_of", "has_attributes", "is_of_python", "names_of", "put_back", "used_by"]

_VALUES = (*weakref.ProxyTypes, type(None), bool, int, float, complex, str, bytes, ModuleType, io.IOBase)
# Packages of Python whose objects hold what no forward pass computes with, or what other threads may change meanwhile.
_NOT_LOOKED_INTO = (
    *("logging", "re", "warnings", "_abc", "contextlib", "enum", "inspect", "typing"),
    *("threading", "queue", "concurrent", "multiprocessing", "asyncio"),
)
# What amptune holds of a training.
_OWN = "amptune.runtime."
# What a class has in common with its instances, and what makes attributes of them: code, not state.
_CODE = (FunctionType, staticmethod, classmethod, property)
_SMALL_BYTES = 1 << 16
# The content of what has a place that can neither be seen nor put back.
ITERATOR = object()


def content_of(value: Any) -> Any:
    """Returns what may change inside the same object: {place: item}, the state of a generator, `ITERATOR`, or None.

    Attributes are in an object of their own, `vars(value)`. Functions have `used_by`.
    """
    module = type(value).__module__
    if isinstance(value, _VALUES) or module.partition(".")[0] in _NOT_LOOKED_INTO or module.startswith(_OWN):
        return None
    return _kind_of(value).read(value)


def has_attributes(value: Any) -> bool:
    """Returns True for an object that may be given attributes of any name, which `vars` returns; not for a class."""
    return bool(type(value).__dictoffset__) and not isinstance(value, type)


def is_of_python(cls: type) -> bool:
    """Returns True for a class of the standard library."""
    return cls.__module__.partition(".")[0] in sys.stdlib_module_names


def put_back(value: Any, content: Any) -> None:
    """Restores what was inside an object, as far as it can be written."""
    with suppress(TypeError, AttributeError, ValueError):
        _kind_of(value).write(value, content)


# --- functions -----------------------------------------------------------------------------------------------------


def used_by(function: FunctionType, methods: Mapping[str, Sequence[Any]]) -> dict[str, Any] | None:
    """Returns what the code of a function names: globals, `methods` and other attributes of classes, and its cells."""
    if is_foreign(function):
        return None
    found = {name: space[place] for name, space, place in _names_in(function) if place in space}
    for name in names_of(function.__code__):
        found |= {f"{name}/{place}": value for place, value in enumerate(methods.get(name, ()))}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    defaults = (function.__defaults__, function.__kwdefaults__)
    return {**found, **{f"closure.{name}": cell for name, cell in cells}, "default arguments": defaults}


@functools.cache
def names_of(code: CodeType) -> dict[str, bool]:
    """Returns the names in the code, and in that of functions within it: True for globals, False for attributes alone.

    In the body of a class a name may be a global too, and a string may name an attribute.
    """
    texts = (one for one in code.co_consts if isinstance(one, str) and one.isidentifier())
    found = dict.fromkeys((*code.co_names, *texts), False)
    found |= {one.argval: True for one in dis.get_instructions(code) if one.opname.endswith(("_GLOBAL", "_NAME"))}
    for inner in (names_of(one) for one in code.co_consts if isinstance(one, CodeType)):
        found |= {name: is_global or found.get(name, False) for name, is_global in inner.items()}
    return found


def _names_in(function: FunctionType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields (name, namespace, name in it) of what may be a global of the function's module, or of one that it names.

    There is none for the wrapper that a decorator of PyTorch or Python has made. A module that it names is looked into
    if it is of the same package, or not installed, such as a script's.
    """
    known, names = function.__globals__, names_of(function.__code__)
    if _is_library(known):
        return
    modules = ((f"{name}.", vars(known[name])) for name in names if isinstance(known.get(name), ModuleType))
    for prefix, space in (("", known), *modules):
        is_own = _package_of(space) == _package_of(known) or "-packages" not in (space.get("__file__") or "")
        if is_own and not _is_library(space):
            yield from ((prefix + name, space, name) for name, is_global in names.items() if is_global or prefix)


def _package_of(namespace: Mapping[str, Any]) -> str:
    return str(namespace.get("__name__")).partition(".")[0]


def _is_library(namespace: Mapping[str, Any]) -> bool:
    return _package_of(namespace) in (*FOREIGN, *sys.stdlib_module_names)


def _put_names_back(function: FunctionType, content: Mapping[str, Any]) -> None:
    for name, space, place in _names_in(function):
        if name in content:
            space[place] = content[name]
        elif not isinstance(space.get(place), ModuleType):  # which an import would not set again
            space.pop(place, None)


# --- objects with items --------------------------------------------------------------------------------------------


def _base_of(value: Any) -> Any:
    """Returns the built-in type of a container: a subclass's own methods may refuse, or compute something."""
    return next(base for base in (OrderedDict, dict, set, deque, list) if isinstance(value, base))


def _refill(value: Any, content: Mapping[Any, Any]) -> None:
    base = _base_of(value)
    base.clear(value)
    if base in (OrderedDict, dict):
        for key, item in content.items():
            base.__setitem__(value, key, item)
    else:
        (base.update if base is set else base.extend)(value, content.values())


def _refill_bytes(value: Any, content: bytes) -> None:
    value[:] = content if isinstance(value, bytearray) else array(value.typecode, content)


def _in_cell(cell: CellType) -> dict[str, Any]:
    with suppress(ValueError):  # an empty one
        return {"cell": cell.cell_contents}
    return {}


def _referents(value: Any) -> dict[Any, Any]:
    calls = {"size": tuple(value.cache_info())[1:]} if isinstance(value, functools._lru_cache_wrapper) else {}
    return {**calls, **dict(enumerate(gc.get_referents(value)))}


# --- objects with attributes ---------------------------------------------------------------------------------------


def _of_class(value: type) -> dict[str, Any] | None:
    return None if is_foreign(value) else {k: v for k, v in vars(value).items() if not isinstance(v, _CODE)}


def _of_object(value: Any) -> dict[str, Any] | None:
    """Returns its slots, and the dictionary of all other attributes."""
    with_slots = [cls for cls in type(value).__mro__ if "__slots__" in vars(cls)]
    slots = [name for cls in with_slots for name, one in vars(cls).items() if isinstance(one, MemberDescriptorType)]
    found = {"__dict__": vars(value)} if has_attributes(value) else {}
    for name in slots:
        with suppress(AttributeError):  # an empty one
            found[name] = object.__getattribute__(value, name)
    return found if slots or found else None


def _put_attributes_back(value: Any, content: Mapping[str, Any]) -> None:
    """Writes what changed, past a class's own `__setattr__`."""
    base: Any = type if isinstance(value, type) else object
    for name in changed_keys(content_of(value), content):
        if name in content:
            base.__setattr__(value, name, content[name])
        else:
            base.__delattr__(value, name)


# --- kinds of objects ----------------------------------------------------------------------------------------------


def _bits_of(value: Any) -> Any:
    """Returns the bit generator of a random generator of NumPy, or None."""
    if type(value).__module__.partition(".")[0] != "numpy":
        return None
    return getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)


class _Kind(NamedTuple):
    """How to read what is inside objects of some types, as {place: item} or a value, and how to write it."""

    types: Any  # or a function that tells if an object is of the kind
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any] = lambda _, __: None


_KINDS = (
    _Kind(FunctionType, lambda _: None, _put_names_back),
    _Kind(random.Random, random.Random.getstate, random.Random.setstate),
    _Kind(
        torch.Generator,
        lambda value: tuple(value.get_state().tolist()),
        lambda value, content: value.set_state(torch.tensor(content, dtype=torch.uint8)),
    ),
    _Kind((list, deque), lambda value: dict(enumerate(_base_of(value).__iter__(value))), _refill),
    _Kind(tuple, lambda value: dict(enumerate(value))),
    _Kind(set, lambda value: {id(item): item for item in sorted(set.__iter__(value), key=id)}, _refill),
    _Kind(dict, lambda value: dict(_base_of(value).items(value)), _refill),
    _Kind((bytearray, array), bytes, _refill_bytes),
    _Kind(CellType, _in_cell, lambda value, content: setattr(value, "cell_contents", content["cell"])),
    _Kind(
        ContextVar,
        lambda value: {"value": value.get(None)},
        lambda value, content: value.set(content["value"]),
    ),
    _Kind(MethodType, lambda value: {"self": value.__self__, "": value.__func__}),
    _Kind((functools._lru_cache_wrapper, *_CODE, functools.partial), _referents),
    _Kind(
        lambda value: (type(value).__module__, type(value).__name__) == ("numpy", "ndarray"),
        lambda value: value.tobytes() if value.nbytes <= _SMALL_BYTES else None,
        lambda value, content: value.__setitem__(..., type(value)(value.shape, value.dtype, content)),
    ),
    _Kind(
        lambda value: _bits_of(value) is not None,
        lambda value: pickle.dumps(_bits_of(value).state),
        lambda value, content: setattr(_bits_of(value), "state", pickle.loads(content)),  # noqa: S301  # made above
    ),
    _Kind(lambda value: hasattr(type(value), "__next__"), lambda _: ITERATOR),
    _Kind(type, _of_class, _put_attributes_back),
    _Kind(object, _of_object, _put_attributes_back),
)


def _kind_of(value: Any) -> _Kind:
    def is_of(types: Any) -> Any:
        return types(value) if isinstance(types, FunctionType) else isinstance(value, types)

    return next(kind for kind in _KINDS if is_of(kind.types))
