"""Counts GPUs by CUDA's driver alone: importing torch, which knows them too, takes seconds."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["gpu_count"]

# CUDA_ERROR_NO_DEVICE of the driver API (cuda.h).
_NO_DEVICE = 100
# AMD's kernel driver (https://rocm.docs.amd.com).
_ROCM = Path("/dev/kfd")


def gpu_count() -> int | None:
    """Returns how many GPUs CUDA's driver has, 0 without a driver, or None if it does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None if _ROCM.exists() else 0  # torch says why ROCm's GPUs are refused
    count, answer = ctypes.c_int(), driver.cuInit(0)
    if answer == _NO_DEVICE:
        return 0
    return count.value if answer == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else None
