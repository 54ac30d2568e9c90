"""A machine's space, narrowed to what can matter for a model, and to what the user pinned. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from amptune.errors import SpaceError
from amptune.measure.results.subject import Subject
from amptune.policy.settings import Policy, amp_recipe
from amptune.search.space.knobs import (
    BATCHNORM,
    CHECKPOINTS,
    FLOAT8,
    IN_HALF,
    MASTERS,
    SEARCHED,
    WEIGHTS,
    Dimension,
    Space,
    pin,
    with_choices,
    without_knob,
)

__all__ = ["narrowed"]


def narrowed(
    space: Space,
    subject: Subject,
    pins: Mapping[str, str],
    *,
    compiling: bool | None,
    saves_memory: bool = False,
    devices: int = 1,
) -> tuple[Space, tuple[Policy, ...]]:
    """Returns the space narrowed to a model and the pins, and its AMP recipes before these.

    Raises `SpaceError` for a pin that means nothing.
    """
    if saves_memory:
        space = replace(space, forbid=tuple(rule for rule in space.forbid if not rule.for_speed))
    else:
        space = without_knob(space, CHECKPOINTS)
    if devices > 1 and space.choices("cuda_graphs"):  # nobody has measured them in a group that exchanges gradients
        said = "cannot be measured over several devices; leave it out, or leave out --devices"
        _require_plain("cuda_graphs", pins, said)
        space = with_choices(space, "cuda_graphs", (False,), otherwise=False)
    if not subject.blocks:
        said = "is for repeated blocks, and the model has none; a policy file can name any modules"
        _require_plain(CHECKPOINTS, pins, said)
    if not subject.wide_linears:
        said = (
            "is for Linears of 4096 × 2048 and more besides the head, on a GPU of compute capability 8.9 or more with "
            "torchao, and there are none; a policy file can name any Linears"
        )
        _require_plain(FLOAT8, pins, said)
    space = _for_model(space, subject)
    recipes = _amp_recipes(space)
    if recipes and subject.leaves:
        space = with_choices(space, IN_HALF, (False, True), otherwise=False)
    space = _compiling(space, pins, compiling)
    for name, value in pins.items():
        space = pin(space, name, value)
    return _with_half_weights(space, pins), recipes


def _require_plain(name: str, pins: Mapping[str, str], said: str) -> None:
    """Raises `SpaceError` if a knob is pinned to anything but stock PyTorch's value."""
    if pins.get(name, "none").lower() not in ("none", "false", "off"):
        raise SpaceError(f"--set {name}={pins[name]} {said}")


def _compiling(space: Space, pins: Mapping[str, str], wanted: bool | None) -> Space:
    """Applies `--compile` or `--no-compile` to the space."""
    modes, pinned = space.choices("compile"), pins.get("compile")
    if pinned is not None and wanted is (pinned == "off"):
        said = "--compile" if wanted else "--no-compile"
        raise SpaceError(f"{said} and --set compile={pinned} contradict each other; leave one of them out")
    if wanted is False and modes:
        return with_choices(space, "compile", ("off",))
    if wanted and not [mode for mode in modes if mode != "off"]:
        raise SpaceError(f"the search space of {space.architecture} has no torch.compile to try")
    return space


def _with_half_weights(space: Space, pins: Mapping[str, str]) -> Space:
    """Turns autocast off if half weights are pinned, and adds master weights and BatchNorm in FP32 unless set."""
    asked = [name for name in (MASTERS, BATCHNORM) if pins.get(name, "").lower() in ("true", "on")]
    if asked and "half" not in space.choices(WEIGHTS):
        raise SpaceError(f"--set {asked[0]}=true means nothing for FP32 weights; add --set weights=half")
    if space.choices(WEIGHTS) != ("half",):
        return space
    autocast = pins.get("autocast", "off")
    if autocast != "off":
        raise SpaceError(
            f"--set weights=half and --set autocast={autocast} contradict each other; leave one of them out"
        )
    for name in (MASTERS, BATCHNORM):
        if not space.choices(name):
            space = with_choices(space, name, (True,), otherwise=True)
    return with_choices(space, "autocast", ("off",), otherwise="off")


def _for_model(space: Space, subject: Subject) -> Space:
    """Drops values that cannot matter: layouts and cuDNN plans without convolutions, exclusions without modules.

    Starting points have the only value left besides stock PyTorch's in place of one that is dropped (channels_last_3d
    for channels_last, in a network for videos), else the plain one.
    """
    for knob in space.knobs:
        of = SEARCHED[knob.name]
        choices = tuple(value for value in knob.choices if of.matters(value, subject)) or (of.stock,)
        others = [value for value in choices if value != of.stock]
        plain = Dimension(name=knob.name, choices=choices).plain
        space = with_choices(space, knob.name, choices, otherwise=others[0] if len(others) == 1 else plain)
        if of.is_optional and choices == (of.stock,):
            space = without_knob(space, knob.name)
    modes = space.choices("compile")
    if "step" in modes:  # the model alone was nowhere faster (reports/h200/compile_scopes)
        space = with_choices(space, "compile", tuple(one for one in modes if one != "default"), otherwise="step")
    return space


def _amp_recipes(space: Space) -> tuple[Policy, ...]:
    """Returns the AMP recipe in every dtype of this machine, contiguous and in the model's channels-last format."""
    formats = space.choices("memory_format") or ("contiguous",)
    return tuple(amp_recipe(dtype, memory_format=layout) for layout in formats for dtype in space.half_dtypes)
