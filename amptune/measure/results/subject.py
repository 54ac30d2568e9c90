"""Facts about a workload's model, known before the first trial and used to narrow the search."""

from __future__ import annotations

from dataclasses import dataclass, replace

from amptune.hardware.machine import Hardware
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = ["Leaf", "Module", "Prepared", "Subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One module without children, as seen in one forward pass.

    `flops` counts the multiplications and additions of one forward pass at the workload's batch size; it is 0 for
    modules that are not a matrix product. `cast_numel` counts the elements that autocast converts for the module
    (input, weight, bias). `called` is its position in the order of first calls, None if the pass did not reach it.
    """

    path: str
    type: str
    parameters: int
    flops: int
    cast_numel: int
    called: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Any module of the model except the root, under the first of its paths.

    `types` are the names of its class and base classes, which type rules match. `runs` is False for a container
    without its own forward (a ModuleList); in a rule such a container stands for its children. `in_half` is False for
    one that `half_modules` may not name.
    """

    path: str
    types: tuple[str, ...]
    runs: bool = True
    in_half: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The workload as the search sees it.

    `convolution_dims` are the numbers of spatial dimensions of its convolutions. `root_types` are the names of the
    model's class and base classes. `tolerance` is the allowed distance of `evaluate` from its value in FP32. `fusable`
    tells if the optimizer has a fused kernel not used yet, `own_step` if the workload defines its own step, `own_loop`
    if training can call `tuned.training_step`. `as_is` is what it sets today, `summary` of a running script what it
    trains, in a line.
    `accumulate` is the number of batches for one optimizer step in training today. `repeated_leaves` counts the
    leaves of blocks that equal another, which a compiler of blocks need not compile again; `blocks` are the paths of
    such blocks, in order, that can compute their activations again. `wide_linears` are the paths of the Linears for
    which FP8 may pay and that can run in it on this machine, without the last one called, the head. `threads` is the
    number of threads that PyTorch uses on a CPU, and 0 for a model that is trained on a GPU. A model that computes in
    float64 alone is not `castable`: autocast and half weights leave float64 as it is.
    """

    name: str
    source_digest: str
    model_digest: str
    batch_size: int
    parameters: int
    leaves: tuple[Leaf, ...]
    convolution_dims: frozenset[int]
    modules: tuple[Module, ...] = ()
    root_types: tuple[str, ...] = ()
    tolerance: float | None = None
    fusable: bool = True
    own_step: bool = False
    own_loop: bool = True
    as_is: Policy | None = None
    summary: str | None = None
    accumulate: int = 1
    repeated_leaves: int = 0
    blocks: tuple[str, ...] = ()
    wide_linears: tuple[str, ...] = ()
    threads: int = 0
    castable: bool = True

    @property
    def in_place(self) -> bool:
        """True for a running script: its model and optimizer stay its own."""
        return self.summary is not None

    @property
    def noticed(self) -> tuple[Finding, ...]:
        """Findings about the model by itself, before any trial."""
        if self.castable:
            return ()
        message = (
            "the model computes in float64, which autocast, half weights and TF32 leave as it is, so none of them was "
            "tried; if FP32 is precise enough for it, build it in FP32 and tune that"
        )
        return (Finding(code="float64", message=message),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A worker's first answer: the hardware it runs on and the workload it will measure.

    `memory_mib` is the device memory that a training process can use: the free memory once its context is open (on a
    CPU, the available memory), or the user's limit. It is None if unknown. `start_s` is the time in seconds from the
    start of its process until the workload was built; another worker needs the same time. `batches` is the number of
    different batches to time steps on, if it is known, and `draw_s` the seconds to draw them. `noticed` is what the
    guard found in a step of the user's own, and that other programs run. So many `devices` train together in a step
    that is timed, by the workload's `own_parallel` or DistributedDataParallel. `most_samples` is the largest batch that
    the loader can give, all of its data, if that is known; it `has_data_loader` if that is PyTorch's.
    """

    hardware: Hardware
    subject: Subject
    memory_mib: float | None = None
    start_s: float = 0.0
    draw_s: float = 0.0
    batches: int | None = None
    noticed: tuple[Finding, ...] = ()
    devices: int = 1
    own_parallel: bool = False
    most_samples: int | None = None
    has_data_loader: bool = False

    @property
    def labels(self) -> dict[str, str]:
        """The labels of this machine, and the model's digest."""
        return {**dict(self.hardware.labels), "model": self.subject.model_digest}

    def beside(self, busy: int, cores: int) -> Prepared:
        """Returns these facts where other programs keep so many of the CPU's cores busy."""
        if not busy or self.subject.threads <= cores - busy:
            return self
        message = (
            f"other programs keep {busy} of {cores} CPU cores busy, so timings are uneven: stop them, or read the "
            "answer as one that holds while they run, fewer threads above all"
        )
        found = Finding(code="busy-cpu", message=message, figures={"busy": busy, "cores": cores})
        return replace(self, noticed=(*self.noticed, found))
