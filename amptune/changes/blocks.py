"""The repeated blocks of a model, which torch.compile compiles once for all that are equal."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from amptune.changes.flags import hold

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

__all__ = [
    "compile_blocks",
    "compile_in_place",
    "holds_compiled",
    "repeated_blocks",
    "repeated_leaves",
    "repeated_paths",
]

# Where `Module.compile` keeps what it makes.
_COMPILED = "_compiled_call_impl"
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[Hashable, list[nn.Module]]:
    """Returns the outermost modules that equal a sibling, and siblings of their class, with equal ones together.

    Equal are modules of one class with weights and buffers of the same names, shapes and dtypes, and the same
    floating numbers as attributes, which a compiler makes constants. A container without a forward pass of its own is
    no block, nor is a module without children.
    """
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for block in dict.fromkeys(_blocks_in(model)):
        found[_kind_of(block)].append(block)
    return dict(found)


def repeated_paths(model: nn.Module) -> list[str]:
    """Returns the paths of the repeated blocks, in the model's order."""
    blocks = {block for alike in repeated_blocks(model).values() for block in alike if len(alike) > 1}
    return [path for path, module in model.named_modules() if module in blocks]


def repeated_leaves(model: nn.Module) -> int:
    """Returns the number of modules without children in blocks that equal another, which is compiled for them."""
    repeats = [block for alike in repeated_blocks(model).values() for block in alike[1:]]
    return sum(not any(module.children()) for block in repeats for module in block.modules())


def holds_compiled(model: nn.Module) -> bool:
    """Returns True if any module of the model is compiled in place."""
    return any(getattr(module, _COMPILED, None) is not None for module in model.modules())


def compile_blocks(model: nn.Module) -> Callable[[], None]:
    """Compiles each repeated block in place, at its first call; returns a function that undoes it.

    Blocks share code, and so PyTorch's limit on how often it is compiled, which is raised by the number of kinds. Each
    shape has a graph of its own: kinds may differ in nothing but the shapes of their inputs.
    """
    from torch._dynamo import config  # takes a second to import; only compiled policies need it

    kinds = repeated_blocks(model)
    blocks = [block for alike in kinds.values() for block in alike]
    limits_back = [_raised(config, name, max(1, len(kinds))) for name in _LIMITS]
    warn_again = _without_warning_of_gradients()
    compiled = [compile_in_place(block, dynamic=False) for block in blocks]

    def undo() -> None:
        for back in (*limits_back, warn_again, *compiled):
            back()

    return undo


def compile_in_place(module: nn.Module, mode: str | None = None, *, dynamic: bool | None = None) -> Callable[[], None]:
    """Has calls of the module run compiled, from the first one on; returns a function that undoes it."""
    before = vars(module).get(_COMPILED)
    module.compile(mode=mode, dynamic=dynamic)

    def undo() -> None:
        vars(module).pop(_COMPILED, None)
        if before is not None:
            vars(module)[_COMPILED] = before

    return undo


def _raised(config: Any, name: str, factor: int) -> Callable[[], None]:
    return hold(name, factor * getattr(config, name), partial(getattr, config, name), partial(setattr, config, name))


def _without_warning_of_gradients() -> Callable[[], None]:
    """Ignores a warning that PyTorch's compiler makes PyTorch give; returns a function that undoes it.

    The compiler reads `grad` of each input, and a block's is no leaf. PyTorch keeps the warning from being shown; but
    where warnings are errors, compiling fails.
    """
    before = [*warnings.filters]
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning, r"torch\.")
    added = {*warnings.filters}.difference(before)

    def undo() -> None:
        filters = cast("list[Any]", warnings.filters)
        for one in added.intersection(filters):
            filters.remove(one)

    return undo


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    siblings: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for child in module.children():
        if any(child.children()) and not isinstance(child, _CONTAINERS):
            siblings[type(child)].append(child)
    repeated = {kind for kind, alike in siblings.items() if len(set(map(_kind_of, alike))) < len(alike)}
    for child in module.children():
        if type(child) in repeated:
            yield child
        else:
            yield from _blocks_in(child)


def _kind_of(block: nn.Module) -> Hashable:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    numbers = [
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
    ]
    return type(block), tuple((name, one.shape, one.dtype) for name, one in tensors), tuple(numbers)
