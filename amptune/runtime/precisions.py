"""The precision that each module of a model gets under a policy. Reads the model, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.kept_in_fp32 import modules_kept
from amptune.runtime.selection import Selected, runnable_in, select

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from amptune.policy.settings import ModuleRule
    from amptune.runtime.swapping import Precision

__all__ = ["kept_by", "precisions_of"]


def precisions_of(settings: Policy, model: nn.Module) -> list[tuple[Selected, Precision]]:
    """Returns the modules that get a precision of their own. FP32 rules win for all that is inside their modules."""
    wide = select(model, settings.fp32_modules)
    narrow = select(model, settings.half_modules, "half_modules")
    if settings.weights == "half":
        return list(_around_half_weights(model, wide))
    if settings.autocast == "off":
        return []
    inside = {module for one in wide for module in one.module.modules()}
    kept: list[tuple[Selected, Precision]] = [(one, _precision_of(one.rule)) for one in wide]
    return kept + [(one, "half") for one in narrow if one.module not in inside]


def _around_half_weights(model: nn.Module, wide: Sequence[Selected]) -> Iterator[tuple[Selected, Precision]]:
    """Yields the outermost modules that run (FP32 in and out, half inside), and the FP32 modules within them."""
    tops = list(runnable_in(model))
    for top in tops:
        if all(one.module is not top for one in wide):
            path = next(path for path, module in model.named_modules() if module is top)
            yield Selected(path=path, module=top), "half-weights"
    for one in wide:
        yield one, "fp32-weights" if one.module not in tops else "fp32"


def kept_by(settings: Policy, model: nn.Module, selected: Sequence[tuple[Selected, Precision]]) -> set[nn.Module]:
    """Returns the modules that keep FP32 weights when the others are half."""
    named = [one.module for one, precision in selected if precision in ("fp32", "fp32-weights")]
    return modules_kept(model, named, keep_batchnorm=settings.keep_batchnorm_fp32)


def _precision_of(rule: ModuleRule | None) -> Precision:
    return "fp32-cast" if isinstance(rule, Fp32Rule) and rule.cast_output else "fp32"
