"""Peak memory of one trial in a process that runs many trials, and limits on memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Protocol

import psutil
import torch

from amptune.hardware.machine import MIB

__all__ = ["PeakMemory", "available_mib", "limit_memory", "memory_for"]

# Share of a CPU's available memory that a training process may use before the machine begins to swap.
CPU_SHARE = 0.8


class PeakMemory(Protocol):
    """A meter of peak memory since the last `reset`, in MiB."""

    def reset(self) -> None: ...

    def peak_mib(self) -> tuple[float, float]:
        """Returns (allocated, reserved)."""
        ...

    def alloc_retries(self) -> int:
        """Returns how often the allocator flushed its cache to find memory; above 0, the timings are not valid."""
        ...


class _CudaPeakMemory:
    def __init__(self) -> None:
        self._retries_before = 0

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._retries_before = self._retries()

    def peak_mib(self) -> tuple[float, float]:
        return torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB

    def alloc_retries(self) -> int:
        return self._retries() - self._retries_before

    @staticmethod
    def _retries() -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class _ResidentPeakMemory:
    """A meter of the peak resident set. The kernel's high-water mark covers the whole process, so it is reset first.

    The C library keeps memory that was freed, and what one trial had used counted in the next: a transformer seemed to
    take as much with its blocks computed again as without. So the library gives that memory back first.
    """

    def reset(self) -> None:
        gc.collect()
        if _trim is not None:
            _trim(0)
        # On Linux, 5 resets VmHWM: https://docs.kernel.org/filesystems/proc.html ("clear_refs")
        marks = Path("/proc/self/clear_refs")
        if marks.exists():
            try:
                marks.write_text("5")
            except OSError:
                return  # a container may forbid it; the mark then covers earlier trials too

    def peak_mib(self) -> tuple[float, float]:
        peak = _high_water_mark_mib() or psutil.Process().memory_info().rss / MIB
        return peak, peak

    def alloc_retries(self) -> int:
        return 0


def memory_for(device: torch.device) -> PeakMemory:
    return _CudaPeakMemory() if device.type == "cuda" else _ResidentPeakMemory()


def available_mib(device: torch.device) -> float:
    """Returns the memory this process could use, its own included. NVML's figure would ignore the CUDA context."""
    if device.type != "cuda":
        own = psutil.Process().memory_info().rss
        return (psutil.virtual_memory().available * CPU_SHARE + own) / MIB
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device)) / MIB


def limit_memory(device: torch.device, mib: float) -> None:
    """Makes PyTorch's GPU allocator raise out-of-memory above `mib`; the CPU's allocator has no such limit."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, mib * MIB / total), device)


# Only glibc has it (malloc_trim(3)).
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _high_water_mark_mib() -> float | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024  # the kernel writes kB
    return None
