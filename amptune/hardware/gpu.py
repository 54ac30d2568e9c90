"""Builds a `Gpu` from torch's device properties, the table of generations, and NVML's readings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from amptune.hardware.generations import generation_of
from amptune.hardware.machine import Gpu

if TYPE_CHECKING:
    from amptune.hardware.nvml import NvmlGpu

__all__ = ["as_torch_has_it", "with_readings"]

_MIB = 1024 * 1024


def as_torch_has_it(index: int, properties: Any) -> Gpu:
    """Returns the GPU without NVML readings; `properties` come from `torch.cuda.get_device_properties`."""
    compute_capability = (properties.major, properties.minor)
    generation = generation_of(compute_capability, properties.name)
    return Gpu(
        index=index,
        name=properties.name,
        uuid=str(properties.uuid),
        generation=generation.name,
        compute_capability=compute_capability,
        memory_mib=properties.total_memory // _MIB,
        multiprocessors=properties.multi_processor_count,
        tensor_cores=generation.tensor_cores,
        bf16=generation.bf16,
        tf32=generation.tf32,
        fp8=generation.fp8,
        fp16_rate=generation.fp16_rate,
    )


def with_readings(gpu: Gpu, nvml: NvmlGpu) -> Gpu:
    """Returns the GPU with all NVML readings added; memory stays torch's figure if NVML has none."""
    # CUDA puts "MIG" in a slice's name. If its UUID led to the whole GPU, NVML's memory figure is not the slice's.
    other_memory = "MIG" in gpu.name.split() and not nvml.mig_slice
    return replace(
        gpu,
        uuid=nvml.uuid,
        memory_mib=gpu.memory_mib if other_memory else nvml.memory_mib() or gpu.memory_mib,
        power_limit_w=nvml.power_limit_w(),
        sm_clock_mhz=nvml.sm_clock_mhz(),
        sm_clock_max_mhz=nvml.sm_clock_max_mhz(),
        memory_clock_mhz=nvml.memory_clock_mhz(),
        temperature_c=nvml.temperature_c(),
        mig=nvml.mig_mode(),
        ecc=nvml.ecc(),
        other_processes=None if other_memory else nvml.processes(),
    )
