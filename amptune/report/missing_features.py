"""The table of what a GPU lacks: tensor cores, dtypes, the compiler's kernels, those of the PyTorch here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amptune.policy.findings import Finding

if TYPE_CHECKING:
    from amptune.hardware.machine import Gpu

__all__ = ["missing_on"]

# torch._inductor refuses older GPUs: "… only supports devices of CUDA Capability >= 7.0".
_TRITON_FROM = (7, 0)


def missing_on(gpu: Gpu, architectures: Sequence[str], version: str) -> tuple[Finding, ...]:
    """Returns a finding for each thing that is missing, with the code `missing-…`.

    `architectures` are those that torch, of this `version`, has kernels for: `torch.cuda.get_arch_list()`.
    """
    found = [
        ("tensor-cores", not gpu.tensor_cores, "no tensor cores: half precision computes at FP32's rate at best"),
        ("bf16", not gpu.bf16, "no bf16 (PyTorch emulates it slowly): use fp16 with a GradScaler"),
        ("tf32", not gpu.tf32, "no TF32: fp32_math tf32 changes nothing"),
        (
            "triton",
            gpu.compute_capability < _TRITON_FROM,
            "no Triton: torch.compile's default backend refuses this GPU",
        ),
    ]
    told = [Finding(code=f"missing-{code}", message=message) for code, lacks, message in found if lacks]
    return (*told, *_kernels_missing(gpu.compute_capability, architectures, version))


def _kernels_missing(capability: tuple[int, int], architectures: Sequence[str], version: str) -> tuple[Finding, ...]:
    """Compares with torch's list, such as ["sm_75", "compute_90"]: sm_75 runs on 7.5 and later 7.x, PTX on later."""
    binaries = [_capability(one) for one in architectures if one.startswith("sm_")]
    intermediates = [_capability(one) for one in architectures if one.startswith("compute_")]
    runs = any(one[0] == capability[0] and one <= capability for one in binaries)
    if runs or any(one <= capability for one in intermediates):
        return ()
    name = ".".join(map(str, capability))
    message = f"torch {version} here has no kernels for compute capability {name}: it has {', '.join(architectures)}"
    return (Finding(code="missing-kernels", message=message),)


def _capability(architecture: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", architecture)
    return int(digits[:-1]), int(digits[-1])
