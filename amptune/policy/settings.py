"""The settings of a policy, without evidence, name or hardware. A policy is hashable, so it is its own key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from amptune.policy.knobs.autocast import AUTOCAST, Autocast
from amptune.policy.knobs.batch import ACCUMULATE, BATCH_SIZE
from amptune.policy.knobs.checkpoint import CHECKPOINT
from amptune.policy.knobs.compile_mode import AUTOTUNED_MODES, COMPILE, CUDA_GRAPH_MODES, WHOLE_MODES, CompileMode
from amptune.policy.knobs.cuda_graphs import CUDA_GRAPHS, CudaGraphs
from amptune.policy.knobs.cudnn_benchmark import CUDNN_BENCHMARK
from amptune.policy.knobs.float8_modules import FLOAT8_MODULES, Float8Rule
from amptune.policy.knobs.fp32_math import FP32_MATH, Fp32Math
from amptune.policy.knobs.fused_optimizer import FUSED_OPTIMIZER
from amptune.policy.knobs.half_weights import KEEP_BATCHNORM_FP32, MASTER_WEIGHTS, WEIGHTS, Weights
from amptune.policy.knobs.knob import Knob
from amptune.policy.knobs.loader import LOADER, Loader
from amptune.policy.knobs.loss_scale import LOSS_SCALE, LossScale
from amptune.policy.knobs.memory_format import MEMORY_FORMAT, MemoryFormat
from amptune.policy.knobs.precision_rules import FP32_MODULES, HALF_MODULES, Fp32Rule, HalfRule, ModuleRule, Reason
from amptune.policy.knobs.threads import THREADS

__all__ = [
    "AUTOTUNED_MODES",
    "CUDA_GRAPH_MODES",
    "KNOBS",
    "STOCK",
    "WHOLE_MODES",
    "Autocast",
    "CompileMode",
    "Float8Rule",
    "Fp32Math",
    "Fp32Rule",
    "HalfRule",
    "Loader",
    "LossScale",
    "MemoryFormat",
    "ModuleRule",
    "Policy",
    "Reason",
    "Weights",
    "amp_recipe",
    "settled",
]

# All knobs, in the order in which a policy file has them; `Policy` has a field for each.
KNOBS: tuple[Knob, ...] = (
    AUTOCAST,
    WEIGHTS,
    MASTER_WEIGHTS,
    KEEP_BATCHNORM_FP32,
    FP32_MATH,
    FP32_MODULES,
    HALF_MODULES,
    FLOAT8_MODULES,
    MEMORY_FORMAT,
    CUDNN_BENCHMARK,
    BATCH_SIZE,
    ACCUMULATE,
    THREADS,
    CHECKPOINT,
    COMPILE,
    CUDA_GRAPHS,
    FUSED_OPTIMIZER,
    LOSS_SCALE,
    LOADER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to run a training step. `Policy()` is stock PyTorch; every field departs from it when set.

    `batch_size` is per device and None leaves it to the user; `accumulate` counts micro-batches per optimizer
    step. A module that several kinds of rules name stays in FP32, or else runs in FP8.

    `weights: half` holds weights and buffers in fp16, which replaces autocast: `master_weights` lets the optimizer
    update them in FP32, and `keep_batchnorm_fp32` leaves BatchNorm's out. `loss_scale` belongs to fp16 alone; None
    means `torch.amp.GradScaler`'s defaults there, and no scaling for half weights without master weights.

    `cuda_graphs` records the model's training passes, or as "step" the whole training step of `tuned.training_step`,
    and replays them, kernel for kernel; some modes of `compile` have CUDA graphs of their own. `compile: blocks`
    compiles repeated blocks one by one, equal ones once; `compile: step` the model and the loss, as one.
    `checkpoint` names modules, by path, whose activations are computed again in the backward pass.
    `loader` is for the DataLoaders of training, and None leaves them as they are.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    autocast: Autocast = "off"
    weights: Weights = "fp32"
    master_weights: bool = False
    keep_batchnorm_fp32: bool = False
    fp32_math: Fp32Math = "stock"
    fp32_modules: tuple[Fp32Rule, ...] = ()
    half_modules: tuple[HalfRule, ...] = ()
    float8_modules: tuple[Float8Rule, ...] = ()
    memory_format: MemoryFormat = "contiguous"
    cudnn_benchmark: bool = False
    batch_size: int | None = None
    accumulate: int = 1
    threads: int = 0
    checkpoint: tuple[str, ...] = ()
    compile: CompileMode = "off"
    cuda_graphs: CudaGraphs = False
    fused_optimizer: bool = False
    loss_scale: LossScale | None = None
    loader: Loader | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` with every problem, one per line, each starting with the setting's name."""
        own = [knob for knob in KNOBS if knob.of(self) is not knob.stock]  # a search makes many, with few settings each
        wrong = [problem for knob in own if (problem := knob.problem(knob.of(self)))]
        wrong += [problem for knob in own if knob.departs(self) and (problem := knob.conflict(self))]
        if wrong:
            raise ValueError("\n".join(wrong))

    @property
    def precision(self) -> Autocast | Literal["half"]:
        """The default precision of matrix products: "half" for half weights, else the autocast setting."""
        return "half" if self.weights == "half" else self.autocast

    @property
    def recipe(self) -> Policy:
        """This policy's precision for all modules, with every other setting at stock; tuning tries it first."""
        return Policy(**{knob.name: knob.of(self) for knob in KNOBS if knob.precision == "whole"})

    @property
    def scales_loss(self) -> bool:
        """True if fp16 gradients need scaling: under autocast, or for half weights with masters or a `loss_scale`."""
        return self.autocast == "fp16" or (
            self.weights == "half" and (self.master_weights or self.loss_scale is not None)
        )

    @property
    def uses_fp32_math(self) -> bool:
        """True if this policy lets any product run in FP32: with half precision, those of the modules that it excludes.

        A model may keep others in FP32 by itself, which a policy cannot know.
        """
        return self.precision == "off" or bool(self.fp32_modules)

    @property
    def needs_call(self) -> bool:
        """True if a loop has all of it that trains by `tuned.training_step`, and no other."""
        return "step" in (self.cuda_graphs, self.compile)

    @property
    def compiles_whole(self) -> bool:
        """True if the whole model is compiled, which frameworks do by themselves; they do not compile its blocks."""
        return self.compile in WHOLE_MODES

    def compiled(self, mode: CompileMode) -> Policy:
        """Returns this policy with a torch.compile mode, and recorded if it can be, unless the mode records by itself.

        Blocks are recorded; so are whole steps where this policy records them, or where the loss is compiled too.
        """
        step: CudaGraphs = "step" if self.weights == "fp32" else False
        graphs = {"blocks": self.cuda_graphs or True, "step": step, "default": self.cuda_graphs == "step" and step}
        return replace(self, compile=mode, cuda_graphs=not self.checkpoint and graphs.get(mode, False))

    def departures(self) -> Iterator[tuple[str, Any]]:
        """Yields each setting that differs from stock PyTorch, as (name, value), in the order of the file."""
        yield from ((knob.name, knob.of(self)) for knob in KNOBS if knob.departs(self))

    def __str__(self) -> str:
        return ", ".join(knob.in_words(knob.of(self)) for knob in KNOBS if knob.departs(self)) or "stock PyTorch"


STOCK = Policy()


def amp_recipe(autocast: Autocast, **more: Any) -> Policy:
    """Returns PyTorch's AMP recipe as most people try it first: autocast and nothing else, plus `more`."""
    return Policy(autocast=autocast, **more)


def settled(settings: Mapping[str, Any]) -> Policy:
    """Returns the policy with these settings, without those that it cannot have beside the others."""
    chosen = SimpleNamespace(**{knob.name: settings.get(knob.name, knob.stock) for knob in KNOBS})
    for knob in KNOBS:
        if knob.departs(chosen) and knob.conflict(chosen):
            setattr(chosen, knob.name, knob.stock)
    return Policy(**vars(chosen))
