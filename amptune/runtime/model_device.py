"""The device type of a model, found again at each step without searching the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

__all__ = ["ModelDevice"]


class ModelDevice:
    """The present device type of a model, by its first parameter, or else its first buffer.

    The tensor's place in the model is remembered, as searching the model takes longer than all else that a policy does
    in a step. If a module on the path to the tensor was replaced, or the tensor removed, the search runs again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._way: tuple[tuple[Mapping[str, Any], str, nn.Module], ...] = ()
        self._holder: Mapping[str, Any] = {}
        self._name = ""

    @property
    def device_type(self) -> str:
        """The device type; `cpu` for a model without parameters and buffers."""
        stands = self._name in self._holder  # no `get`: what TorchScript's modules have in place of dicts has none
        for children, name, child in self._way:
            if name not in children or children[name] is not child:
                stands = False
        tensor = self._holder[self._name] if stands else None
        if tensor is None:
            tensor = next(self._tensors(), None)
        return "cpu" if tensor is None else str(tensor.device.type)

    def _tensors(self) -> Iterator[Any]:
        """Yields parameters, then buffers, and notes the path to each."""
        for kind in ("_parameters", "_buffers"):
            for path, module in self._model.named_modules():
                self._holder = getattr(module, kind)
                self._way = tuple(self._steps(path))
                for name, tensor in self._holder.items():
                    if tensor is not None:
                        self._name = name
                        yield tensor

    def _steps(self, path: str) -> Iterator[tuple[Mapping[str, Any], str, nn.Module]]:
        module = self._model
        for name in path.split(".") if path else ():
            child = module._modules[name]
            assert child is not None  # noqa: S101  # named_modules() has just been there
            yield module._modules, name, child
            module = child
