"""Checks `--device` before torch is imported, which takes seconds."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from amptune.errors import DeviceError
from amptune.hardware.cuda_driver import gpu_count

if TYPE_CHECKING:
    from amptune.cli.torchrun import Torchrun

__all__ = ["require_device", "require_devices", "require_ranks"]


def require_device(device: str | None) -> None:
    """Raises `DeviceError` if the text names no device, or a GPU that CUDA's driver does not have.

    What the driver does not tell is left to torch, which a worker asks (`hardware.detect`).
    """
    asked = re.fullmatch(r"cpu|cuda(?::(\d+))?", device or "cpu")
    if asked is None:
        raise DeviceError(f"{device!r} is no device: write cpu, cuda or cuda:1, or leave it out")
    count = None if device in (None, "cpu") else gpu_count()
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
    count = gpu_count()
    if count is not None and count < workers:
        has = f"has {count}" if count else "has none, or cannot be loaded"
        raise DeviceError(
            f"--workers {workers} needs a GPU for each: CUDA's driver {has}; choose fewer, or share the CPU's "
            "cores with --device cpu"
        )


def require_ranks(job: Torchrun, device: str | None) -> None:
    """Raises `DeviceError` unless the job's processes are all on this node, and each can have a GPU, or all the CPU."""
    require_device(device)
    if job.on_this_node < job.processes:
        raise DeviceError(
            f"torchrun started {job.processes} processes, {job.on_this_node} of them on this node, and amptune "
            "measures on one node: start it with --nnodes 1"
        )
    if device not in (None, "cpu", "cuda"):
        raise DeviceError(
            f"torchrun's {job.processes} processes take the first {job.processes} GPUs, and --device {device} names "
            "one: leave it out, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    count = None if device == "cpu" else gpu_count()
    if count is not None and count < job.processes and (count or device == "cuda"):
        raise DeviceError(
            f"torchrun started {job.processes} processes, and CUDA's driver has {count} GPU{'s' * (count != 1)}: give "
            "fewer with --nproc-per-node, or measure on the CPU with --device cpu"
        )
