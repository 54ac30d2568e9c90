"""Measures the difference between two passes of a model, and the difference that rounding alone causes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from amptune.runtime.graphs.host_effects import without_repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import nn

__all__ = ["Difference", "Limits", "named_gradients", "named_results", "relative_differences", "unit_of"]

_OUTPUT = "output"

# A difference counts above this many times what rounding does, as both are samples, and above what sums in another
# order differ by in FP32.
SLACK, LEAST = 4.0, 1e-5
# A difference of a gradient that the next check does not find counts above this: where rounding turns a single ReLU,
# which is in one pass of hundreds, outputs stay as they are, and gradients that nearly cancel differed by up to 0.04
# (a small network with noise as of sums in any order, 1200 passes).
ONCE = 0.1
_KEPT = (torch.float16, torch.bfloat16, torch.float32)


def named_results(outputs: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns outputs and buffers by a name for messages."""
    by_name = {f"{_OUTPUT} {number}": one for number, one in enumerate(outputs, 1)}
    by_name |= {f"the buffer {name}": one for name, one in buffers.items()}
    return {name: one.detach() for name, one in by_name.items()}


def named_gradients(
    model: nn.Module, gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]]
) -> dict[str, torch.Tensor]:
    """Returns the gradients of weights by a name for messages, but those that are None."""
    names: dict[torch.Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    return {f"the gradient of {names[weight]}": one for weight, one in gradients if one is not None}


def relative_differences(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns |own - other| / |own| for each name (2-norms, FP32), without waiting for the device.

    Outputs must have the same non-finite values in the same places, else it is infinite. For what else has non-finite
    values it is 0, if both have some.
    """
    pairs = [(_plain(one), _plain(other[name])) for name, one in own.items()]
    masked = [_finite(*pair) if name.startswith(_OUTPUT) else pair for name, pair in zip(own, pairs, strict=True)]
    owns, others = map(list, zip(*masked, strict=True))
    sizes, other_sizes, apart = (
        torch.stack(torch._foreach_norm(each, 2, torch.float32))
        for each in (owns, others, torch._foreach_sub(owns, others))
    )
    ratio = torch.where(apart == 0, 0.0, apart / sizes)
    finite = sizes.isfinite()
    ratio = torch.where(finite & other_sizes.isfinite(), ratio, torch.inf)
    return torch.where(finite | other_sizes.isfinite(), ratio, 0.0)


def _finite(own: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both with 0 in the places where they agree on a value that is not finite, as masked logits do."""
    alike = (own == other) | (own.isnan() & other.isnan())
    finite = own.isfinite() & other.isfinite()
    return torch.where(finite, own, 0), torch.where(finite, other, torch.where(alike, 0.0, torch.inf).to(other.dtype))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor if tensor.dtype in _KEPT else tensor.float()


class Limits(dict[str, float]):
    """The largest difference allowed for each result of two passes that compute the same, by name."""

    @classmethod
    def of(
        cls,
        first: Mapping[str, torch.Tensor],
        another: Callable[[], Mapping[str, torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        model: nn.Module,
    ) -> Limits:
        """Compares the first pass with another one, and with one after a rounding error in what both began with.

        That is the inputs, and the gradients of the outputs. Where no input is a floating one, it is the weights.
        """
        limits = [0.0] * len(first)
        for changed in (False, True):
            with _rounded(inputs, gradients, model) if changed else nullcontext():
                found = another()
            limits = list(map(max, limits, relative_differences(first, found).tolist()))
        return cls({name: SLACK * limit + LEAST for name, limit in zip(first, limits, strict=True)})

    def __missing__(self, name: str) -> float:
        return LEAST

    def widened(self, other: Limits) -> Limits:
        """Returns the larger limit for each result."""
        return Limits({name: max(self[name], other[name]) for name in {**self, **other}})


@dataclass(frozen=True)
class Difference:
    """A replay's results that differ by more than the recording's limits: {name: (difference, limit)}.

    `call` is that of the recording, and at its call `since` it did not differ.
    """

    call: int
    since: int
    results: dict[str, tuple[float, float]] = field(default_factory=dict)

    def told(self) -> str:
        """Returns the first difference in words: an output's, or else a buffer's, or else a gradient's."""
        name, (apart, limit) = next(iter(self.results.items()))
        by = "" if limit == 0 else f" by {apart:.2g} of its size, where {limit:.2g} is allowed"
        return f"{name} is another{by}"

    def exceeds(self, limits: Limits, gradients: Collection[str]) -> bool:
        """Returns True if it is more than limits that were measured since; gradients may differ more, once."""
        return any(
            not apart <= max(limits[name], ONCE if name in gradients else 0.0)
            for name, (apart, _) in self.results.items()
        )


@contextmanager
def _rounded(inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], model: nn.Module) -> Iterator[None]:
    """Changes floating tensors, or else the weights, by a unit in the last place of the dtype that computes."""
    floating = [without_repeats(one) for one in inputs if one.is_floating_point()]
    changed = [*(floating or [one.data for one in model.parameters() if one.is_floating_point()]), *gradients]
    before = [one.clone() for one in changed]
    unit = unit_of(changed[0].device.type, model)
    try:
        for one, value in zip(changed, before, strict=True):
            generator = torch.Generator(one.device).manual_seed(0)
            signs = torch.randint(0, 2, one.shape, generator=generator, device=one.device) * 2 - 1
            one.copy_(value + value * (signs * max(unit, torch.finfo(one.dtype).eps)))
        yield
    finally:
        for one, value in zip(changed, before, strict=True):
            one.copy_(value)


def unit_of(device_type: str, model: nn.Module) -> float:
    """Returns a unit in the last place, relative, of the dtype that computes."""
    if torch.is_autocast_enabled(device_type):
        return torch.finfo(torch.get_autocast_dtype(device_type)).eps
    weights = [one for one in model.parameters() if one.is_floating_point()]
    convolves = any(one.dim() > 3 for one in weights)
    matmul, conv = (torch._C._get_fp32_precision_getter("cuda", kind) for kind in ("matmul", "conv"))
    is_tf32 = device_type == "cuda" and (matmul == "tf32" or (conv == "tf32" and convolves))
    return max([2.0**-10 if is_tf32 else 0.0, *(torch.finfo(one.dtype).eps for one in weights)])
