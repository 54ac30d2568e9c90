"""Settings of the whole process, such as the switches of FP32 math: several policies may hold one at a time."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["before", "fp32_math_now", "hold", "is_held", "set_fp32_math", "take_defaults"]

# By the name of a setting: its value before the first policy, then that of each policy, each in a list of its own.
_held: dict[str, list[list[Any]]] = {}

# PyTorch 2.9 and later store FP32 math twice: in older switches (set_float32_matmul_precision, allow_tf32), and in a
# tree of fp32_precision settings, in which "none" follows the parent. Reading an older switch raises if the two
# disagree (https://docs.pytorch.org/docs/stable/notes/cuda.html, TensorFloat-32).
_PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_LEAVES = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))

# The attributes of torch.backends call these two. One attribute, mkldnn.fp32_precision, sets another setting than
# it reads (torch 2.13, torch/backends/mkldnn/__init__.py).
_read = torch._C._get_fp32_precision_getter
_write = torch._C._set_fp32_precision_setter

# (matrix products, cuDNN's convolutions and RNNs). Stock is PyTorch's default.
_WANTED = {
    "stock": ("ieee", "tf32"),
    "ieee": ("ieee", "ieee"),
    "tf32": ("tf32", "tf32"),
}

_OLDER_NAME = {"ieee": "highest", "tf32": "high"}


def hold(name: str, value: Any, read: Callable[[], Any], write: Callable[[Any], object]) -> Callable[[], None]:
    """Sets a setting of the process, and returns a function that undoes it. The last of several policies has its way.

    When all are undone, in whatever order, the setting is as it was before the first. An undo that was interrupted may
    be called again.
    """
    values, own = _held.setdefault(name, []), [value]

    def undo() -> None:
        if any(one is own for one in values):
            rest = [one for one in values if one is not own]
            if values[-1] is own:
                write(rest[-1][0])
            values[:] = rest if len(rest) > 1 else []

    values += [own] if values else [[read()], own]
    try:
        write(value)
    except BaseException:
        undo()
        raise
    return undo


def is_held(name: str) -> bool:
    """Returns True while a policy holds the setting."""
    return bool(_held.get(name))


def before(name: str, read: Callable[[], Any]) -> Any:
    """Returns the setting as it is without any policy."""
    return _held[name][0][0] if is_held(name) else read()


def set_fp32_math(math: str) -> Callable[[], None]:
    """Sets the precision of FP32 matrix products, convolutions and RNNs; changes nothing if it is set already."""
    matmul, cudnn = _WANTED[math]
    if _holds(matmul, cudnn) and not is_held("fp32_math"):
        return _nothing
    wanted = _Fp32State(
        matmul_precision=_OLDER_NAME[matmul],
        cudnn_allow_tf32=cudnn == "tf32",
        leaves={("cuda", "matmul"): matmul, ("cuda", "conv"): cudnn, ("cuda", "rnn"): cudnn},
    )
    return hold("fp32_math", wanted, _state, _set)


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fp32State:
    """The older switches, and the settings of the tree's leaves by (backend, operation)."""

    matmul_precision: str
    cudnn_allow_tf32: bool
    leaves: Mapping[tuple[str, str], str]


def _holds(matmul: str, cudnn: str) -> bool:
    """Returns True if the tree and the older switches both agree; unset ("none") matrix products are IEEE."""
    if _read("cuda", "matmul").replace("none", "ieee") != matmul:
        return False
    if {_read("cuda", "conv"), _read("cuda", "rnn")} != {cudnn}:
        return False
    return _older_matmul() == _OLDER_NAME[matmul] and _older_cudnn() is not None


def _state() -> _Fp32State:
    """Returns the state from which `_set` restores all. Overwrites the leaves, so the caller must set them next."""
    seen = {leaf: _read(*leaf) for leaf in _LEAVES}
    with _parents_unset():
        own = {leaf: _read(*leaf) for leaf in _LEAVES}
        matmul_precision, cudnn_allow_tf32 = _older_switches()
    # PyTorch's own default follows a parent and cannot be written, so its effective value is written instead.
    leaves = {leaf: own[leaf] if own[leaf] in ("none", seen[leaf]) else seen[leaf] for leaf in _LEAVES}
    return _Fp32State(matmul_precision=matmul_precision, cudnn_allow_tf32=cudnn_allow_tf32, leaves=leaves)


@contextmanager
def _parents_unset() -> Iterator[None]:
    """Unsets the parents, so that each leaf reads as its own setting."""
    before = {}
    for parent in _PARENTS:  # from the top, since a parent's own parent must be unset before it is read
        before[parent] = _read(*parent)
        _write(*parent, "none")
    try:
        yield
    finally:
        for parent, value in before.items():
            _write(*parent, value)


def _older_switches() -> tuple[str, bool]:
    """Returns (matmul precision, cudnn.allow_tf32), after setting leaves that contradict neither."""
    for leaf in (("cuda", "matmul"), ("mkldnn", "matmul")):
        _write(*leaf, "ieee")
    for leaf in (("cuda", "conv"), ("cuda", "rnn")):
        _write(*leaf, "tf32")
    with _deprecation_unsaid():
        return torch.get_float32_matmul_precision(), _older_cudnn() is True


def _older_matmul() -> str | None:
    """Returns None if the switch contradicts the tree."""
    with _deprecation_unsaid():
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            return None


def _older_cudnn() -> bool | None:
    """Returns None if the switch contradicts the tree."""
    with _deprecation_unsaid():
        try:
            return torch.backends.cudnn.allow_tf32
        except RuntimeError:
            return None


def _set(state: _Fp32State) -> None:
    """Sets all in this order, since the older switches overwrite leaves."""
    with _deprecation_unsaid():
        torch.set_float32_matmul_precision(state.matmul_precision)
        torch.backends.cudnn.allow_tf32 = state.cudnn_allow_tf32
    for leaf, precision in state.leaves.items():
        _write(*leaf, precision)


@contextmanager
def _deprecation_unsaid() -> Iterator[None]:
    """Hides the older switches' deprecation warnings: amptune sets them, not the user, as other code reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def fp32_math_now() -> Literal["stock", "ieee", "tf32"]:
    """Returns the FP32 math that is set now, as policies name it; "stock" for any other mixture."""
    matmul, conv = _read("cuda", "matmul"), _read("cuda", "conv")
    if matmul == "tf32":
        return "tf32"
    return "ieee" if conv == "ieee" else "stock"


def take_defaults() -> None:
    """Gives FP32 math and `cudnn.benchmark` PyTorch's defaults, for policies to depart from."""
    set_fp32_math("stock")
    torch.backends.cudnn.benchmark = False
