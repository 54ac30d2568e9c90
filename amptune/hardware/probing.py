"""Reads the real machine: NVML and torch for the GPU, the system for the CPU. Allocates nothing on the GPU."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import replace

from amptune.errors import DeviceError
from amptune.hardware.cpu import read_cpu
from amptune.hardware.gpu import as_torch_has_it, with_readings
from amptune.hardware.labels import labels_of, site_labels
from amptune.hardware.machine import Gpu, Hardware, Software
from amptune.hardware.nvml import NvmlAbsent, connect

__all__ = ["probe"]


def probe(device: str | None = None) -> Hardware:
    """Returns the hardware for `device`: `cuda`, `cuda:1` or `cpu`; the default is the GPU if there is one.

    Raises `DeviceError` for a device that does not exist, and for malformed labels in `AMPTUNE_LABELS`.
    """
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
