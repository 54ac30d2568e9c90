"""The settings of a policy, without evidence, name or hardware. A policy is hashable, so it is its own key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args

__all__ = [
    "AUTOTUNED_MODES",
    "CUDA_GRAPH_MODES",
    "STOCK",
    "Autocast",
    "CompileMode",
    "Fp32Math",
    "Fp32Rule",
    "HalfRule",
    "LossScale",
    "MemoryFormat",
    "ModuleRule",
    "Policy",
    "Reason",
    "Weights",
    "amp_recipe",
]

Autocast = Literal["off", "bf16", "fp16"]
Weights = Literal["fp32", "half"]
Fp32Math = Literal["stock", "ieee", "tf32"]
MemoryFormat = Literal["contiguous", "channels_last", "channels_last_3d"]
CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

# Modes in which CUDA graphs launch a model's kernels, and modes in which torch.compile times alternative kernels.
CUDA_GRAPH_MODES: frozenset[CompileMode] = frozenset({"reduce-overhead", "max-autotune"})
AUTOTUNED_MODES: frozenset[CompileMode] = frozenset({"max-autotune", "max-autotune-no-cudagraphs"})

# The settings that are words, with their values.
_WORDS = {
    "autocast": get_args(Autocast),
    "weights": get_args(Weights),
    "fp32_math": get_args(Fp32Math),
    "memory_format": get_args(MemoryFormat),
    "compile": get_args(CompileMode),
}

# For pydantic, which makes the JSON Schemas from these classes: a key that is not a field of the class is an error.
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a module is kept in FP32, as measured.

    `saves_ms` is the step time its exclusion saves; `risk` how many times as large the module makes the relative
    error of what passes through it in half precision, a million where that overflows.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    saves_ms: float | None = None
    risk: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """Modules that run in a precision of their own: by `path` or by `type`, exactly one of the two.

    A path is exact, or a pattern in which `*` stands for one name and `**` for any depth. A type is a class
    name as `type(module).__name__` or one of its bases has it. `reason` is no setting: two rules that differ in
    it alone are equal.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    path: str | None = None
    type: str | None = None
    reason: Reason | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.type is None):
            raise ValueError("a rule names either a path or a type, and not both")
        if self.path == "" or self.type == "":
            raise ValueError("a rule's path or type must not be empty")

    @property
    def is_needed(self) -> bool:
        """True if the numerics need this rule; False if it serves speed alone."""
        return self.reason is not None and self.reason.risk is not None

    def __str__(self) -> str:
        return self.path if self.path is not None else f"type {self.type}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Rule(ModuleRule):
    """Modules kept out of autocast, or out of half weights.

    `cast_output` casts the output back to the autocast dtype, so an FP32 output does not promote the stream
    behind it. Beside half weights every output is cast back: what follows could not take it otherwise.
    """

    cast_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfRule(ModuleRule):
    """Modules without children run in the autocast dtype although autocast would compute them in FP32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Loss scaling of fp16; the defaults are those of `torch.amp.GradScaler`.

    The scale starts at `init`, doubles after `growth_interval` clean steps, up to `max` (None: without end), and halves
    with each step that overflows, which is skipped. One that is `static` stays at `init`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    init: float = 65536.0
    growth_interval: int = 2000
    max: float | None = None
    static: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` with every problem, one per line, each starting with the field's name."""
        wrong = []
        if not self.init > 0:
            wrong.append(f"init: {self.init} is not above 0")
        if self.growth_interval < 1:
            wrong.append(f"growth_interval: {self.growth_interval} is not at least 1")
        if self.max is not None and self.static:
            wrong.append("max: a static loss scale does not grow")
        elif self.max is not None and not self.max >= self.init:
            wrong.append(f"max: {self.max:g} is below init, {self.init:g}")
        if wrong:
            raise ValueError("\n".join(wrong))

    def __str__(self) -> str:
        most = "" if self.max is None else f", at most {self.max:.10g}"
        return f"{'static ' if self.static else ''}{self.init:.10g}{most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to run a training step. `Policy()` is stock PyTorch; every field departs from it when set.

    `batch_size` is per device and None leaves it to the user; `accumulate` counts micro-batches per optimizer
    step. A module that both kinds of rules name stays in FP32.

    `weights: half` holds weights and buffers in fp16, which replaces autocast: `master_weights` lets the optimizer
    update them in FP32, and `keep_batchnorm_fp32` leaves BatchNorm's out. `loss_scale` belongs to fp16 alone; None
    means `torch.amp.GradScaler`'s defaults there, and no scaling for half weights without master weights.

    `cuda_graphs` records the model's training passes and replays them, kernel for kernel, with nothing compiled; modes
    of `compile` have CUDA graphs of their own.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    autocast: Autocast = "off"
    weights: Weights = "fp32"
    master_weights: bool = False
    keep_batchnorm_fp32: bool = False
    fp32_math: Fp32Math = "stock"
    fp32_modules: tuple[Fp32Rule, ...] = ()
    half_modules: tuple[HalfRule, ...] = ()
    memory_format: MemoryFormat = "contiguous"
    cudnn_benchmark: bool = False
    batch_size: int | None = None
    accumulate: int = 1
    compile: CompileMode = "off"
    cuda_graphs: bool = False
    fused_optimizer: bool = False
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` with every problem, one per line, each starting with the setting's name."""
        wrong = [
            f"{name}: {getattr(self, name)!r} is not one of {', '.join(words)}"
            for name, words in _WORDS.items()
            if type(getattr(self, name)) is not str or getattr(self, name) not in words
        ]
        if self.batch_size is not None and self.batch_size < 1:
            wrong.append(f"batch_size: {self.batch_size} is not at least 1")
        if self.accumulate < 1:
            wrong.append(f"accumulate: {self.accumulate} is not at least 1")
        wrong += self._of_half_weights()
        if self.cuda_graphs and self.compile != "off":
            wrong.append(
                f"cuda_graphs: what torch.compile makes has CUDA graphs by its mode (reduce-overhead), and compile is "
                f"{self.compile}"
            )
        if self.loss_scale is not None and self.autocast != "fp16" and self.weights != "half":
            wrong.append(f"loss_scale: only autocast fp16 scales the loss, and autocast is {self.autocast}")
        if wrong:
            raise ValueError("\n".join(wrong))

    def _of_half_weights(self) -> Iterator[str]:
        if self.weights == "half" and self.autocast != "off":
            yield f"weights: half weights compute in half without autocast, and autocast is {self.autocast}"
        if self.master_weights and self.weights != "half":
            yield f"master_weights: only half weights have FP32 masters, and weights is {self.weights}"
        if self.keep_batchnorm_fp32 and self.weights != "half":
            yield f"keep_batchnorm_fp32: BatchNorm is in FP32 already where weights is {self.weights}"

    @property
    def precision(self) -> Autocast | Literal["half"]:
        """The default precision of matrix products: "half" for half weights, else the autocast setting."""
        return "half" if self.weights == "half" else self.autocast

    @property
    def recipe(self) -> Policy:
        """This policy's precision for all modules, with every other setting at stock; tuning tries it first."""
        return Policy(
            autocast=self.autocast,
            weights=self.weights,
            master_weights=self.master_weights,
            keep_batchnorm_fp32=self.keep_batchnorm_fp32,
        )

    @property
    def scales_loss(self) -> bool:
        """True if fp16 gradients need scaling: under autocast, or for half weights with masters or a `loss_scale`."""
        return self.autocast == "fp16" or (
            self.weights == "half" and (self.master_weights or self.loss_scale is not None)
        )

    @property
    def uses_fp32_math(self) -> bool:
        """True if any product runs in FP32; with half precision, only those of the excluded modules do."""
        return self.precision == "off" or bool(self.fp32_modules)

    def compiled(self, mode: CompileMode) -> Policy:
        """Returns this policy with a torch.compile mode; `cuda_graphs` is off, because the mode decides on graphs."""
        return replace(self, compile=mode, cuda_graphs=False)

    def departures(self) -> Iterator[tuple[str, Any]]:
        """Yields each setting that differs from stock PyTorch, as (name, value), in the order of the file."""
        for f in fields(self):
            value = getattr(self, f.name)
            if value != getattr(STOCK, f.name):
                yield f.name, value

    def __str__(self) -> str:
        words = [_in_words(name, value) for name, value in self.departures()]
        return ", ".join(words) or "stock PyTorch"


STOCK = Policy()


def amp_recipe(autocast: Autocast, **more: Any) -> Policy:
    """Returns PyTorch's AMP recipe as most people try it first: autocast and nothing else, plus `more`."""
    return Policy(autocast=autocast, **more)


def _in_words(name: str, value: Any) -> str:
    match name:
        case "autocast" | "memory_format":
            return str(value)
        case "fp32_math":
            return f"{value} for FP32"
        case "fp32_modules":
            return "FP32: " + " + ".join(map(str, value))
        case "half_modules":
            return "half: " + " + ".join(map(str, value))
        case "weights":
            return f"{value} weights"
        case "keep_batchnorm_fp32":
            return "BatchNorm in FP32"
        case "cuda_graphs":
            return "CUDA graphs"
        case "cudnn_benchmark" | "fused_optimizer" | "master_weights":
            return name.replace("_", " ")
        case _:
            return f"{name.replace('_', ' ')} {value}"
