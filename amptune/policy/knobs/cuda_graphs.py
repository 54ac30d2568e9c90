"""CUDA graphs of the model's training passes or of whole steps, kernel for kernel, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from amptune.policy.findings import Finding
from amptune.policy.knobs.compile_mode import CUDA_GRAPH_MODES
from amptune.policy.knobs.knob import TRUTH, Knob, Model, Settings

__all__ = ["CUDA_GRAPHS", "CudaGraphs"]

CudaGraphs = bool | Literal["step"]


def _idle(policy: Settings, _: Model) -> Iterator[Finding]:
    import torch

    if policy.cuda_graphs and not torch.cuda.is_available():
        yield Finding(
            code="cuda-graphs-without-effect",
            message="CUDA graphs are a GPU's, and this PyTorch has none: the model runs as without cuda_graphs",
        )


def _conflict(policy: Settings) -> str | Literal[False]:
    if policy.compile in CUDA_GRAPH_MODES:
        return f"cuda_graphs: compile {policy.compile} has CUDA graphs of its own; compile: default has none"
    if policy.checkpoint:
        return (
            "cuda_graphs: a recording has no random numbers to go back to, as checkpoint does for what it computes "
            "again; compile: reduce-overhead has CUDA graphs beside checkpoint"
        )
    if policy.cuda_graphs == "step" and policy.weights == "half":
        return "cuda_graphs: half weights are updated in a way that is not recorded; true records the passes"
    return False


# `apply_policy` records the model last of all, since what training calls is then another one.
CUDA_GRAPHS = Knob(
    name="cuda_graphs",
    stock=False,
    values=(*TRUTH, "step"),
    conflict=_conflict,
    numerics="none",
    matters=lambda value, subject: value != "step" or subject.own_loop,
    idle=_idle,
    words={True: "CUDA graphs", "step": "CUDA graphs of whole steps"},
    risks={
        True: "A replay runs no Python: what forward() does besides computing happens at recordings alone. "
        "amptune compares replays with the model now and then, and ends a recording that differs.",
        "step": "A replay runs no Python. What a step does to the host is looked for before it is recorded, and a step "
        "that does is not. amptune compares replays with the step itself now and then, and ends a recording that "
        "differs.",
    },
    sentences={
        True: "cuda_graphs true: training passes are recorded once for each shape and replayed; keep shapes constant.",
        "step": "cuda_graphs step: the whole training step is recorded once for each shape and replayed, if the loop "
        "trains by tuned.training_step(loss, optimizer), or with a step of its own by "
        "tuned.training_step(step=step, optimizer=optimizers); keep shapes constant, and fuse optimizers.",
    },
)
