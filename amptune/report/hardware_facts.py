"""Describes a machine in lines of text: hardware, capabilities, software and labels. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amptune.hardware.machine import Cpu, Gpu, Hardware

__all__ = ["hardware_in_lines"]


def hardware_in_lines(hardware: Hardware) -> Iterator[str]:
    """Yields the machine, one fact per line, then its labels and what could not be read."""
    facts = _gpu_facts(hardware.gpu) if hardware.gpu else {}
    facts |= _cpu_facts(hardware.cpu)
    software = hardware.software
    facts["software"] = ", ".join(
        f"{name} {version}"
        for name, version in (
            ("torch", software.torch),
            ("Python", software.python),
            ("CUDA", software.cuda),
            ("cuDNN", software.cudnn),
            ("driver", software.driver),
        )
        if version
    )
    width = max(map(len, facts)) + 2
    yield from (f"{name:<{width}}{fact}" for name, fact in facts.items())
    yield "labels"
    yield from (f"  {name}: {value}" for name, value in hardware.labels)
    yield from (f"not read: {reading}" for reading in hardware.unread)


def _gpu_facts(gpu: Gpu) -> dict[str, str]:
    can = [name for name in ("tensor_cores", "bf16", "tf32", "fp8") if getattr(gpu, name)]
    cannot = [name for name in ("tensor_cores", "bf16", "tf32", "fp8") if not getattr(gpu, name)]
    major, minor = gpu.compute_capability
    others = gpu.other_processes
    facts = {
        "gpu": f"{gpu.name} (cuda:{gpu.index}, {gpu.uuid})",
        "generation": f"{gpu.generation}, compute capability {major}.{minor}, {gpu.multiprocessors} multiprocessors",
        "memory": _or_unknown(gpu.memory_mib, "MiB"),
        "has": ", ".join(can).replace("_", " ") or "none of tensor cores, bf16, tf32, fp8",
        "has not": ", ".join(cannot).replace("_", " "),
        "power limit": _or_unknown(gpu.power_limit_w, "W"),
        "sm clock": f"{_or_unknown(gpu.sm_clock_mhz, 'MHz')} of {_or_unknown(gpu.sm_clock_max_mhz, 'MHz')}",
        "mig": "unknown" if gpu.mig is None else "on" if gpu.mig else "off",
        "others on it": "unknown" if others is None else ", ".join(map(str, others)) or "no process",
    }
    return {name: fact for name, fact in facts.items() if fact}


def _cpu_facts(cpu: Cpu) -> dict[str, str]:
    extensions = [name for name, has in (("AVX-512-BF16", cpu.avx512_bf16), ("AMX-BF16", cpu.amx_bf16)) if has]
    return {
        "cpu": f"{cpu.model} ({cpu.architecture}), {cpu.cores} cores"
        + (f", {', '.join(extensions)}" if extensions else ", no bf16 instructions"),
        "cpu memory": _or_unknown(cpu.memory_mib, "MiB"),
    }


def _or_unknown(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:,.0f} {unit}"
