"""The repeated blocks of a model, which torch.compile compiles once for all that are equal."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

__all__ = ["compile_blocks", "holds_compiled", "repeated_blocks", "repeated_leaves", "repeated_paths"]

# Where `Module.compile` keeps what it makes.
_COMPILED = "_compiled_call_impl"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[Hashable, list[nn.Module]]:
    """Returns the outermost modules that equal a sibling, and siblings of their class, with equal ones together.

    Equal are modules of one class with weights and buffers of the same names, shapes and dtypes, and the same
    floating numbers as attributes, which a compiler makes constants. They may differ in the numbers of modules without
    children, weights and buffers, such as the rate of stochastic depth: those stay outside the graphs. A container
    without a forward pass of its own is no block, nor is a module without children.
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

    Modules whose numbers differ between equal blocks run as they are, between the graphs of their block: PyTorch makes
    a constant of any number that a random operation gets, and so a graph for each (`bernoulli_` in
    torchvision.ops.stochastic_depth).

    Blocks share code, and so PyTorch's limit on how often it is compiled, which is raised by the number of kinds. Each
    shape has a graph of its own: kinds may differ in nothing but the shapes of their inputs.
    """
    from torch._dynamo import config  # takes a second to import; only compiled policies need it

    kinds = repeated_blocks(model)
    blocks = [block for alike in kinds.values() for block in alike]
    before = {block: {name: made for name, made in vars(block).items() if name == _COMPILED} for block in blocks}
    limit, most = config.recompile_limit, config.accumulated_recompile_limit
    config.recompile_limit = limit * max(1, len(kinds))
    config.accumulated_recompile_limit = most * max(1, len(kinds))
    warn_again = _without_warning_of_gradients()
    outside = {module: type(module) for alike in kinds.values() for module in _outside_graphs(alike)}
    for module, kind in outside.items():
        module.__class__ = _uncompiled(kind)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    for block in blocks:
        block.compile(dynamic=False)

    def undo() -> None:
        config.recompile_limit, config.accumulated_recompile_limit = limit, most
        warn_again()
        for module, kind in outside.items():
            module.__class__ = kind
        for block, made in before.items():
            vars(block).pop(_COMPILED, None)
            vars(block).update(made)

    return undo


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
    modules = dict(block.named_modules())
    numbers = [
        (path, *one) for path, module in modules.items() if not _can_stay_outside(module) for one in _numbers(module)
    ]
    kinds = [(path, type(module)) for path, module in modules.items() if _can_stay_outside(module)]
    return type(block), tuple((name, one.shape, one.dtype) for name, one in tensors), tuple(numbers), tuple(kinds)


def _numbers(module: nn.Module) -> tuple[tuple[str, float], ...]:
    """Returns the floating numbers that are the module's own attributes, by name."""
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, float))


def _can_stay_outside(module: nn.Module) -> bool:
    """Returns True if a graph loses little without the module: it has numbers, nothing that is trained, and no rule."""
    has_state = any(True for _ in (*module.children(), *module.parameters(), *module.buffers()))
    return not has_state and bool(_numbers(module)) and not hasattr(type(module), "_amptune_change")


def _outside_graphs(alike: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yields the modules of equal blocks that have other numbers than those at their place in other blocks."""
    places = [dict(block.named_modules()) for block in alike]
    for path in places[0]:
        at_path = [modules[path] for modules in places if path in modules]
        if _can_stay_outside(at_path[0]) and len(set(map(_numbers, at_path))) > 1:
            yield from at_path


@cache
def _uncompiled(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass that runs outside compiled graphs; what is copied or pickled from it is of the class itself.

    There is one of each class: a graph is compiled for the classes of a block's modules.
    """
    from torch.compiler import disable

    def reduced(self: nn.Module, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        make, args, *rest = reduced
        return partial(make, *(kind if one is type(self) else one for one in args)), (), *rest

    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    forward = disable(kind.forward)  # type: ignore[no-untyped-call]  # torch has not typed it
    return type(kind.__name__, (kind,), {**same, "forward": forward, "__reduce_ex__": reduced})
