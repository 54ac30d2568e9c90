"""What is known of a workload's model before the first trial: enough to narrow the search, nothing to run it."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.hardware.machine import Hardware

__all__ = ["Leaf", "Module", "Prepared", "Subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One module without children, as one forward pass met it.

    `flops` counts multiply and add of one forward pass at the workload's batch size, 0 for modules that are
    no matrix product; `cast_numel` counts the elements that autocast converts for it (input, weight, bias).
    `called` is its place in the order of first calls, None if the pass did not reach it.
    """

    path: str
    type: str
    parameters: int
    flops: int
    cast_numel: int
    called: int | None

    @property
    def intensity(self) -> float:
        """FLOPs per element cast: what half precision can gain there over what it costs (a roofline's x axis)."""
        return self.flops / self.cast_numel if self.cast_numel else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Any module of the model but the root, under the first of its paths.

    `types` are the names of its class and that one's bases, as type rules go by them; `runs` is False for a
    container without a forward of its own (a ModuleList), which in a rule stands for its children.
    """

    path: str
    types: tuple[str, ...]
    runs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The workload as the search sees it.

    `convolution_dims` are the spatial dimensions of its convolutions, `root_types` the names of the model's own class
    and its bases, `tolerance` how far `evaluate` may be from what it says in FP32. `fusable` is whether there is a
    fused kernel that its optimizer does not use yet, `own_step` whether the workload has a step of its own.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A worker's first answer: where it runs and what it is to measure.

    `memory_mib` is what a training process can have of the device's memory: what is free there once its context is
    open (on a CPU, what is available), or what the user allows. None where that is not known. `start_s` is how many
    seconds it took until the workload was built, which another worker will take too.
    """

    hardware: Hardware
    subject: Subject
    memory_mib: float | None = None
    start_s: float = 0.0
