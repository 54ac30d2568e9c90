"""Objects as bytes for another process: classes and functions of a script by value, tensors on the CPU."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterator, Mapping
from typing import Any

from amptune.errors import TargetError

__all__ = ["from_bytes", "to_bytes"]

# What cannot be pickled is looked for this many objects deep.
DEPTH = 8


def to_bytes(value: Any, name: str) -> bytes:
    """Returns the object as bytes. Raises `TargetError` that names the part of it that cannot be pickled.

    torch writes tensors of any device, so that no process needs the caller's GPU to read them.
    """
    try:
        return _dumped(value)
    except TargetError:
        raise
    except Exception as error:
        place, reason = _culprit(value, name, error)
        raise TargetError(
            f"{name} cannot be sent to the measuring processes: {place}: {type(reason).__name__}: {reason}; leave it "
            "out, or give a function that builds the workload there: def workload(): return Workload…(…)"
        ) from error


def from_bytes(data: bytes) -> Any:
    """Returns the object again, with all its tensors on the CPU."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _dumped(value: Any) -> bytes:
    import cloudpickle
    import torch

    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=cloudpickle)
    return stream.getvalue()


def _culprit(value: Any, place: str, error: Exception) -> tuple[str, Exception]:
    """Returns the innermost part that cannot be pickled, as (its place, why)."""
    for _ in range(DEPTH):
        for name, part in _parts(value):
            try:
                _dumped(part)
            except Exception as why:  # noqa: BLE001  # an object's own code raises what it likes
                value, place, error = part, f"{place}.{name}", why
                break
        else:
            break
    return place, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the named parts of an object: attributes, items, what a function took from where it was defined."""
    if inspect.ismethod(value):
        yield from _parts(value.__self__)
    elif inspect.isfunction(value):
        taken = inspect.getclosurevars(value)
        yield from {**taken.nonlocals, **taken.globals}.items()
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif not isinstance(value, type):
        with contextlib.suppress(Exception):  # an object's own code raises what it likes
            state = value.__getstate__()
            yield from list(state.items()) if isinstance(state, dict) else ()
