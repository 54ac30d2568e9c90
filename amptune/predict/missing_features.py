"""Features that a GPU lacks: dtypes, tensor cores, the compiler's kernels, and kernels in the installed PyTorch."""

from __future__ import annotations

import re

import torch

from amptune.policy.findings import Finding
from amptune.predict.gpu_table import GpuModel

__all__ = ["missing_on"]

# torch._inductor refuses older GPUs: "… only supports devices of CUDA Capability >= 7.0".
_TRITON_FROM = (7, 0)


def missing_on(gpu: GpuModel) -> tuple[Finding, ...]:
    """Returns a finding for each thing that is missing, with the code `missing-…`."""
    generation = gpu.generation
    found = [
        ("tensor-cores", not gpu.half, "no tensor cores: half precision computes at FP32's rate at best"),
        ("bf16", not generation.bf16, "no bf16 (PyTorch emulates it slowly): use fp16 with a GradScaler"),
        ("tf32", not gpu.tf32, "no TF32: fp32_math tf32 changes nothing"),
        ("triton", gpu.compute < _TRITON_FROM, "no Triton: torch.compile's default backend refuses this GPU"),
    ]
    told = [Finding(code=f"missing-{code}", message=message) for code, lacks, message in found if lacks]
    return (*told, *_kernels_missing(gpu, torch.cuda.get_arch_list(), torch.__version__))


def _kernels_missing(gpu: GpuModel, architectures: list[str], version: str) -> tuple[Finding, ...]:
    """Compares with torch's list, such as ["sm_75", "compute_90"]: sm_75 runs on 7.5 and later 7.x, PTX on later."""
    name = ".".join(map(str, gpu.compute))
    if not architectures:
        message = (
            f"torch {version} here has no CUDA kernels: whether a build supports compute capability {name} is unknown"
        )
        return (Finding(code="kernels-unknown", message=message),)
    binaries = [_capability(one) for one in architectures if one.startswith("sm_")]
    intermediates = [_capability(one) for one in architectures if one.startswith("compute_")]
    runs = any(one[0] == gpu.compute[0] and one <= gpu.compute for one in binaries)
    if runs or any(one <= gpu.compute for one in intermediates):
        return ()
    message = f"torch {version} here has no kernels for compute capability {name}: it has {', '.join(architectures)}"
    return (Finding(code="missing-kernels", message=message),)


def _capability(architecture: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", architecture)
    return int(digits[:-1]), int(digits[-1])
