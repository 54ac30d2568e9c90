"""Reads the real machine: NVML and torch for the GPU; /proc, /sys, the cgroup and the system for the CPU.

Allocates nothing on the GPU. The CPU's files are read below `root`, so a test can supply those of another machine.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from amptune.errors import DeviceError
from amptune.hardware.generations import generation_of
from amptune.hardware.labels import labels_of, site_labels
from amptune.hardware.machine import MIB, Cpu, Gpu, Hardware, Software
from amptune.hardware.nvml import NvmlAbsent, connect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from amptune.hardware.nvml import NvmlGpu

__all__ = ["as_torch_has_it", "probe", "read_cpu", "with_readings"]


def probe(device: str | None = None) -> Hardware:
    """Returns the hardware for `device`: `cuda`, `cuda:1` or `cpu`; the default is the GPU if there is one.

    Raises `DeviceError` for a device that does not exist, for malformed labels in `AMPTUNE_LABELS`, on Windows, and for
    a GPU of a torch that was built for ROCm.
    """
    if sys.platform == "win32":
        raise DeviceError("amptune reads Linux and macOS machines, not Windows: run it in WSL 2")
    site = site_labels(os.environ.get("AMPTUNE_LABELS", ""))
    index = _gpu_index(device)
    cpu, software = read_cpu(), _software()
    if index is None:
        labels = labels_of(cpu, None, software, site)
        return Hardware(device="cpu", cpu=cpu, gpu=None, software=software, labels=labels)
    gpu, driver, unread = _read_gpu(index)
    software = replace(software, driver=driver)
    labels = labels_of(cpu, gpu, software, site)
    return Hardware(device="cuda", cpu=cpu, gpu=gpu, software=software, labels=labels, unread=unread)


def _gpu_index(device: str | None) -> int | None:
    """Returns torch's index of the GPU, or None for the CPU."""
    import torch

    available = torch.cuda.is_available()
    if device == "cpu" or (device is None and not available):
        return None
    if available and torch.version.hip is not None:  # compute capabilities there are other GPUs' than in our table
        raise DeviceError(
            "this torch is built for ROCm, and amptune knows NVIDIA's GPUs alone: --device cpu is for the CPU, and "
            'amptune.apply(amptune.load("policy.yaml").policy, model) applies settings that nobody checked here'
        )
    count = torch.cuda.device_count() if available else 0
    asked = re.fullmatch(r"cuda(?::(\d+))?", "cuda" if device is None else device)
    if asked is not None and asked[1] is None and count:
        return torch.cuda.current_device()
    if asked is not None and asked[1] is not None and int(asked[1]) < count:
        return int(asked[1])
    raise DeviceError(f"device {device!r} does not exist here: choose {_choices(count)}, or leave it out")


def _choices(count: int) -> str:
    import torch

    gpus = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(count)]
    return " or ".join(["cpu (torch sees no GPU)"] if not gpus else ["cpu", *gpus])


def _software() -> Software:
    import torch

    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch has not typed it
    return Software(
        torch=str(torch.__version__),
        python=platform.python_version(),
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else _cudnn_version(cudnn),
    )


def _cudnn_version(number: int) -> str:
    """Returns 9.10.2 for 91002 and 8.9.7 for 8907: before cuDNN 9 the major was the thousands (cudnn_version.h)."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _read_gpu(index: int) -> tuple[Gpu, str | None, tuple[str, ...]]:
    """Returns the GPU, the driver's version, and the readings that failed."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    gpu = as_torch_has_it(index, properties)
    nvml = connect(str(properties.uuid))
    if isinstance(nvml, NvmlAbsent):
        return gpu, None, (nvml.why,)
    with nvml:
        gpu = with_readings(gpu, nvml)
        driver = nvml.driver_version()
        return gpu, driver, nvml.unread()


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
        memory_mib=properties.total_memory // MIB,
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


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Returns the CPU with the cores this process may run on and the memory its cgroup allows."""
    facts = _first_processor(_text(root / "proc/cpuinfo") or "")
    flags = facts.get("flags", "").split()
    return Cpu(
        model=facts.get("model name") or platform.processor() or platform.machine() or "unknown CPU",
        architecture=platform.machine(),
        cores=_cores(root),
        memory_mib=_memory_mib(root),
        vendor=facts.get("vendor_id"),
        family=_number(facts.get("cpu family")),
        model_number=_number(facts.get("model")),
        avx512_bf16="avx512_bf16" in flags,
        amx_bf16="amx_bf16" in flags,
    )


def _first_processor(cpuinfo: str) -> Mapping[str, str]:
    lines = cpuinfo.strip().partition("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cores(root: Path) -> int:
    """Returns the number of physical cores: logical CPUs with equal sibling lists are threads of one core."""
    allowed = _allowed_cpus()
    siblings = {_text(root / f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in allowed}
    return len(allowed if None in siblings else siblings)


def _allowed_cpus() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return tuple(os.sched_getaffinity(0))
    return tuple(range(os.cpu_count() or 1))


def _memory_mib(root: Path) -> int:
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # Linux and macOS have both
    return min([installed, *_cgroup_limits(root)]) // MIB


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yields every memory limit, in bytes, from this process's cgroup up to the top; all of them apply.

    Inside a container the cgroup's path may be the host's; then only the top is visible.
    """
    for hierarchy, path in _memory_cgroups(_text(root / "proc/self/cgroup") or ""):
        folder, limit = ("", "memory.max") if hierarchy == "0" else ("memory", "memory.limit_in_bytes")
        for group in (path, *path.parents):
            text = _text(root / "sys/fs/cgroup" / folder / str(group).lstrip("/") / limit)
            if text is not None and text.isdigit():  # "max" means no limit
                yield int(text)


def _memory_cgroups(cgroup: str) -> Iterable[tuple[str, PurePosixPath]]:
    """Yields (hierarchy, path) for cgroup version 2 (lines `0::/path`) and version 1's memory controller."""
    for line in cgroup.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" or "memory" in controllers.split(","):
            yield hierarchy, PurePosixPath(path)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
