"""torch.compile, by its mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import Knob, Model, Settings

__all__ = ["AUTOTUNED_MODES", "COMPILE", "CUDA_GRAPH_MODES", "WHOLE_MODES", "CompileMode"]

CompileMode = Literal[
    "off", "default", "reduce-overhead", "blocks", "step", "max-autotune", "max-autotune-no-cudagraphs"
]
_MODES: tuple[CompileMode, ...] = get_args(CompileMode)

# Modes that compile the whole model alone; those in which the compiler's CUDA graphs launch its kernels; and those
# in which torch.compile times alternative kernels.
WHOLE_MODES: tuple[CompileMode, ...] = tuple(mode for mode in _MODES if mode not in ("off", "blocks", "step"))
CUDA_GRAPH_MODES: frozenset[CompileMode] = frozenset({"reduce-overhead", "max-autotune"})
AUTOTUNED_MODES: frozenset[CompileMode] = frozenset({"max-autotune", "max-autotune-no-cudagraphs"})


def _idle(policy: Settings, model: Model) -> Iterator[Finding]:
    if policy.compile != "blocks":
        return
    from amptune.changes.blocks import repeated_blocks

    if not repeated_blocks(model):
        yield Finding(
            code="compile-without-effect",
            message="no module of the model equals a sibling, so compile: blocks compiles nothing; reduce-overhead "
            "compiles the whole model",
        )


# Its graph has other kernels and other sums, and a mistake in it may be of any size. `apply_policy` compiles the model
# last of all, since what training calls is then another one.
COMPILE = Knob(
    name="compile",
    stock="off",
    values=_MODES,
    process=True,
    # Blocks are compiled by themselves only if that halves what there is to compile.
    matters=lambda mode, subject: {
        "blocks": 0 < len(subject.leaves) <= 2 * subject.repeated_leaves,
        "step": subject.own_loop and not subject.own_step,
    }.get(mode, True),
    idle=_idle,
    risks=dict.fromkeys(
        _MODES[1:], "torch.compile costs up to some minutes at each start, and again for each new shape: pad batches."
    ),
    sentences={
        **{mode: f"compile {mode}: torch.compile runs the model in this mode." for mode in _MODES[1:]},
        "blocks": "compile blocks: torch.compile runs each repeated block by itself; equal blocks are compiled once.",
        "step": "compile step: torch.compile runs model and loss as one, if the loop trains by "
        "tuned.training_step(loss, optimizer); in another loop, the model alone.",
    },
)
