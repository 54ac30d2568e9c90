"""Checks `--device` before torch is imported, which takes seconds."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

from amptune.errors import DeviceError

__all__ = ["require_device", "require_devices"]

# CUDA_ERROR_NO_DEVICE of the driver API (cuda.h).
_NO_DEVICE = 100
# AMD's kernel driver (https://rocm.docs.amd.com).
_ROCM = Path("/dev/kfd")


def require_device(device: str | None) -> None:
    """Raises `DeviceError` if the text names no device, or a GPU that CUDA's driver does not have.

    What the driver does not tell is left to torch, which a worker asks (`hardware.detect`).
    """
    asked = re.fullmatch(r"cpu|cuda(?::(\d+))?", device or "cpu")
    if asked is None:
        raise DeviceError(f"{device!r} is no device: write cpu, cuda or cuda:1, or leave it out")
    count = None if device in (None, "cpu") else _gpus()
    if count is not None and int(asked[1] or 0) >= count:
        has = f"has {count}" if count else "has none, or cannot be loaded"
        raise DeviceError(f"device {device!r} does not exist here: CUDA's driver {has}; choose cpu, or leave it out")


def require_devices(workers: int, device: str | None) -> None:
    """Raises `DeviceError` unless each of several workers can have a GPU of its own, or with `cpu` a core."""
    require_device(device)
    if device == "cpu":
        from amptune.measure.workers.cpu_share import cores

        if sys.platform != "linux" or cores() < workers:
            has = f"this process may use {cores()}" if sys.platform == "linux" else "only Linux shares them out"
            raise DeviceError(f"--workers {workers} needs a CPU core for each: {has}; choose fewer")
        return
    if device not in (None, "cuda"):
        raise DeviceError(
            f"--workers {workers} takes the first {workers} GPUs, and --device {device} names one: leave it out, and "
            "choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    count = _gpus()
    if count is not None and count < workers:
        has = f"has {count}" if count else "has none, or cannot be loaded"
        raise DeviceError(
            f"--workers {workers} needs a GPU for each: CUDA's driver {has}; choose fewer, or share the CPU's "
            "cores with --device cpu"
        )


def _gpus() -> int | None:
    """Returns how many GPUs CUDA's driver has, 0 without a driver, or None if it does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None if _ROCM.exists() else 0  # torch says why ROCm's GPUs are refused
    count, answer = ctypes.c_int(), driver.cuInit(0)
    if answer == _NO_DEVICE:
        return 0
    return count.value if answer == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else None
