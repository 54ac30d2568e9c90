"""Labels that describe a machine, with the names that Kubernetes clusters already use.

GPU labels are those of GPU Feature Discovery (https://github.com/NVIDIA/k8s-device-plugin, internal/lm), CPU labels
those of Node Feature Discovery (https://kubernetes-sigs.github.io/node-feature-discovery, feature labels).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from amptune.errors import DeviceError
from amptune.hardware.generations import GENERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from amptune.hardware.machine import Cpu, Gpu, Software

__all__ = ["is_software_label", "label_of", "labels_of", "site_labels"]

_KNOWN_GENERATIONS = frozenset(generation.name for generation in GENERATIONS.values())
_DRIVER_PART = re.compile(r"nvidia\.com/cuda\.driver(?:-version)?\.(major|minor|rev)(?:ision)?")
_SOFTWARE = frozenset({"torch", "cudnn", "cuda", "driver", "model"})

# Maps the output of `uname -m` to Go's names, which Kubernetes uses.
_ARCHITECTURES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64"}

# Node Feature Discovery takes these names from https://github.com/klauspost/cpuid.
_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD", "HygonGenuine": "Hygon"}


def is_software_label(name: str) -> bool:
    """Returns True if a label names a version or the model, not the hardware; drift there is only a warning."""
    return name in _SOFTWARE or name.startswith("nvidia.com/cuda.")


def labels_of(
    cpu: Cpu, gpu: Gpu | None, software: Software, site: Mapping[str, str] | None = None
) -> tuple[tuple[str, str], ...]:
    """Returns the labels of a machine; `site` overrides all others, because a user wrote those on purpose."""
    labels = {"kubernetes.io/arch": _ARCHITECTURES.get(cpu.architecture, cpu.architecture)}
    labels |= dict(_cpu_labels(cpu) if gpu is None else _gpu_labels(gpu))
    labels |= dict(_software_labels(software, on_gpu=gpu is not None))
    labels |= site or {}
    return tuple(labels.items())


def label_of(name: str, labels: Mapping[str, str]) -> str | None:
    """Returns a label's value, None if there is none; the driver's version also by its parts, old names and new."""
    part = _DRIVER_PART.fullmatch(name)
    if part is None or name in labels:
        return labels.get(name)
    numbers = labels.get("driver", "").split(".")
    place = ("major", "minor", "rev").index(part[1])
    return numbers[place] if place < len(numbers) and numbers[place] else None


def site_labels(text: str) -> Mapping[str, str]:
    """Parses `AMPTUNE_LABELS`, written `name=value,name=value`. Raises `DeviceError` naming all malformed labels."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    wrong = [item for item in items if not item.partition("=")[0].strip() or "=" not in item]
    if wrong:
        listed = ", ".join(repr(item) for item in wrong)
        raise DeviceError(
            f"AMPTUNE_LABELS: {listed}: a label is written name=value, and labels are separated by commas; "
            'for example AMPTUNE_LABELS="rack=a12,example.com/pool=fast"'
        )
    pairs = (item.partition("=") for item in items)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _gpu_labels(gpu: Gpu) -> Iterator[tuple[str, str]]:
    yield "nvidia.com/gpu.product", _product(gpu.name)
    if gpu.generation in _KNOWN_GENERATIONS:
        yield "nvidia.com/gpu.family", "ada-lovelace" if gpu.generation == "ada" else gpu.generation
    if gpu.memory_mib is not None:
        yield "nvidia.com/gpu.memory", str(gpu.memory_mib)
    major, minor = gpu.compute_capability
    yield "nvidia.com/gpu.compute.major", str(major)
    yield "nvidia.com/gpu.compute.minor", str(minor)
    if gpu.mig is not None:  # only a GPU that supports MIG has a MIG mode, on or off
        yield "nvidia.com/mig.capable", "true"


def _product(name: str) -> str:
    """MIG slices need no extra label: CUDA names one "NVIDIA A100-SXM4-40GB MIG 1g.5gb"."""
    return "-".join(re.sub(r"[^A-Za-z0-9-_. ]", "", name).split())


def _cpu_labels(cpu: Cpu) -> Iterator[tuple[str, str]]:
    prefix = "feature.node.kubernetes.io/cpu"
    if cpu.vendor is not None:
        yield f"{prefix}-model.vendor_id", _VENDORS.get(cpu.vendor, cpu.vendor)
    if cpu.family is not None:
        yield f"{prefix}-model.family", str(cpu.family)
    if cpu.model_number is not None:
        yield f"{prefix}-model.id", str(cpu.model_number)
    if cpu.avx512_bf16:
        yield f"{prefix}-cpuid.AVX512BF16", "true"
    if cpu.amx_bf16:
        yield f"{prefix}-cpuid.AMXBF16", "true"


def _software_labels(software: Software, *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    yield "torch", _major_minor(software.torch)
    if not on_gpu:
        return
    if software.cudnn is not None:
        yield "cudnn", _major_minor(software.cudnn)
    if software.cuda is not None:
        yield "cuda", _major_minor(software.cuda)
    if software.driver is not None:
        yield "driver", software.driver
        yield "nvidia.com/cuda.driver-version.full", software.driver


def _major_minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
