"""Loss scaling, which keeps small gradients of fp16 from vanishing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from amptune.policy.knobs.knob import LARGEST, Knob, Settings

__all__ = ["LOSS_SCALE", "LossScale"]

# The scaler holds its scale in FP32, and counts in int32 the steps since it grew.
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Loss scaling of fp16; the defaults are those of `torch.amp.GradScaler`.

    The scale starts at `init`, doubles after `growth_interval` clean steps, up to `max` (None: without end), and halves
    with each step that overflows, which is skipped. One that is `static` stays at `init`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    init: float = 65536.0
    growth_interval: int = 2000
    max: float | None = None
    static: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` with every problem, one per line, each starting with the field's name."""
        wrong = []
        if not self.init > 0:
            wrong.append(f"init: {self.init} is not above 0")
        elif not _SMALLEST <= self.init <= _LARGEST:
            wrong.append(f"init: {self.init:g} is not in the range of FP32, {_SMALLEST:.3g} to {_LARGEST:.3g}")
        if not 1 <= self.growth_interval <= LARGEST:
            which = "at least 1" if self.growth_interval < 1 else f"at most {LARGEST}"
            wrong.append(f"growth_interval: {self.growth_interval} is not {which}")
        if self.max is not None and self.static:
            wrong.append("max: a static loss scale does not grow")
        elif self.max is not None and not self.max >= self.init:
            wrong.append(f"max: {self.max:g} is below init, {self.init:g}")
        elif self.max is not None and self.max > _LARGEST:
            wrong.append(f"max: {self.max:g} is above what FP32 holds, {_LARGEST:.3g}")
        if wrong:
            raise ValueError("\n".join(wrong))

    def __str__(self) -> str:
        most = "" if self.max is None else f", at most {self.max:.10g}"
        return f"{'static ' if self.static else ''}{self.init:.10g}{most}"


def _told(policy: Settings) -> Iterator[str]:
    scale: LossScale | None = policy.loss_scale
    if scale is not None:
        most = "" if scale.max is None else f", up to {scale.max:.10g}"
        yield (
            f"loss_scale: stays at {scale.init:g}."
            if scale.static
            else f"loss_scale: starts at {scale.init:g}, doubles every {scale.growth_interval} clean steps{most}."
        )


LOSS_SCALE = Knob(
    name="loss_scale",
    stock=None,
    conflict=lambda policy: (
        policy.autocast != "fp16"
        and policy.weights != "half"
        and f"loss_scale: only autocast fp16 scales the loss, and autocast is {policy.autocast}"
    ),
    memory=False,
    graph=False,
    precision="part",
    told=_told,
)
