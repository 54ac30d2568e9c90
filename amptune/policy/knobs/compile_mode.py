"""torch.compile, by its mode."""

from __future__ import annotations

from typing import Literal, get_args

from amptune.policy.knobs.knob import Knob

__all__ = ["AUTOTUNED_MODES", "COMPILE", "CUDA_GRAPH_MODES", "CompileMode"]

CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_MODES: tuple[CompileMode, ...] = get_args(CompileMode)

# Modes in which CUDA graphs launch a model's kernels, and modes in which torch.compile times alternative kernels.
CUDA_GRAPH_MODES: frozenset[CompileMode] = frozenset({"reduce-overhead", "max-autotune"})
AUTOTUNED_MODES: frozenset[CompileMode] = frozenset({"max-autotune", "max-autotune-no-cudagraphs"})

# Its graph has other kernels and other sums, and a mistake in it may be of any size. `apply_policy` compiles the model
# last of all, since what training calls is then another one.
COMPILE = Knob(
    name="compile",
    stock="off",
    values=_MODES,
    process=True,
    sentences={mode: f"compile {mode}: torch.compile runs the model in this mode." for mode in _MODES[1:]},
)
