"""Data classes that describe a machine: CPU, GPU and software. Constructing one reads no hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["MIB", "Cpu", "Gpu", "Hardware", "Software"]

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A CPU: `cores` counts physical cores this process may use; memory is the machine's (or the cgroup's limit).

    `vendor`, `family` and `model_number` come from CPUID, so only x86 CPUs have them.
    """

    model: str
    architecture: str
    cores: int
    memory_mib: int | None
    vendor: str | None = None
    family: int | None = None
    model_number: int | None = None
    avx512_bf16: bool = False
    amx_bf16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG slice. A reading is None if NVML could not give it."""

    index: int
    name: str
    uuid: str | None
    generation: str
    compute_capability: tuple[int, int]
    memory_mib: int | None
    multiprocessors: int
    tensor_cores: bool
    bf16: bool
    tf32: bool
    fp8: bool
    fp16_rate: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    mig: bool | None = None
    ecc: bool | None = None
    other_processes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions that decide which kernels run; a version is None if that part is absent."""

    torch: str
    python: str
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine as amptune sees it: the device to tune for, its CPU, and the installed software.

    A policy's `valid_for` and a profile's `match` are compared with `labels`: GPU Feature Discovery's names
    for a GPU, Node Feature Discovery's names for a CPU, `torch`, `cudnn`, and those from `AMPTUNE_LABELS`.
    `unread` lists the readings that failed, each with its reason.
    """

    device: Literal["cuda", "cpu"]
    cpu: Cpu
    gpu: Gpu | None
    software: Software
    labels: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        return self.gpu.name if self.gpu else self.cpu.model

    @property
    def generation(self) -> str:
        """Name of the GPU generation (`hopper`, `turing`, …), or `cpu`."""
        return self.gpu.generation if self.gpu else "cpu"
