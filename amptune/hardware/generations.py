"""Table of GPU generations: the hardware features and the FP16 rate of each compute capability.

Sources: `bf16`, `tf32` and `fp8` from https://nvidia.github.io/TransformerEngine/support_matrix.html and the
architecture sections of the CUDA C++ Programming Guide; `fp16_rate` from its table "Throughput of Native
Arithmetic Instructions" (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions)
unless a row says otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GENERATIONS", "Generation", "generation_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Hardware features of one compute capability; emulated features do not count.

    `fp16_rate` is FP16 throughput divided by FP32 throughput outside tensor cores; None if no source was found.
    """

    name: str
    tensor_cores: bool = False
    bf16: bool = False
    tf32: bool = False
    fp8: bool = False
    fp16_rate: float | None = None


_AMPERE = Generation(name="ampere", tensor_cores=True, bf16=True, tf32=True)
_BLACKWELL = Generation(name="blackwell", tensor_cores=True, bf16=True, tf32=True, fp8=True)

GENERATIONS: Mapping[tuple[int, int], Generation] = MappingProxyType(
    {
        (5, 0): Generation(name="maxwell"),
        (5, 2): Generation(name="maxwell"),
        (5, 3): Generation(name="maxwell", fp16_rate=2.0),  # Jetson TX1
        (6, 0): Generation(name="pascal", fp16_rate=2.0),  # P100
        (6, 1): Generation(name="pascal", fp16_rate=1 / 64),  # GTX 10xx, Titan X, P4, P40
        (6, 2): Generation(name="pascal", fp16_rate=2.0),  # Jetson TX2
        (7, 0): Generation(name="volta", tensor_cores=True, fp16_rate=2.0),  # V100
        (7, 2): Generation(name="volta", tensor_cores=True, fp16_rate=2.0),  # Jetson Xavier
        (7, 5): Generation(name="turing", tensor_cores=True, fp16_rate=2.0),  # T4, RTX 20xx; GTX 16xx below
        (8, 0): replace(_AMPERE, fp16_rate=4.0),  # A100, A30
        (8, 6): replace(_AMPERE, fp16_rate=1.0),  # RTX 30xx, A10, A40: GA102 whitepaper, FP16 non-tensor = FP32
        (8, 7): _AMPERE,  # Jetson Orin
        (8, 9): Generation(  # RTX 40xx, L4, L40: Ada whitepaper, FP16 non-tensor = FP32
            name="ada", tensor_cores=True, bf16=True, tf32=True, fp8=True, fp16_rate=1.0
        ),
        (9, 0): Generation(  # H100, H200, GH200: H100 whitepaper, 133.8 against 66.9 TFLOPS
            name="hopper", tensor_cores=True, bf16=True, tf32=True, fp8=True, fp16_rate=2.0
        ),
        (10, 0): _BLACKWELL,  # B200
        (10, 1): _BLACKWELL,  # Jetson Thor, as CUDA 12 calls it
        (10, 3): _BLACKWELL,  # B300
        (11, 0): _BLACKWELL,  # Jetson Thor, as CUDA 13 calls it
        (12, 0): _BLACKWELL,  # RTX 50xx, RTX PRO 6000
        (12, 1): _BLACKWELL,  # GB10
    }
)

# The chips TU116 and TU117 report 7.5 but have no tensor cores. No CUDA attribute shows this, so the name decides
# (https://github.com/ggml-org/llama.cpp/pull/4682, https://github.com/tracel-ai/cubecl/pull/1588; T400 to T2000,
# MX450 and MX550 are TU117 as well: https://github.com/easydiffusion/easydiffusion/pull/803). A T4 must not match.
_TURING_WITHOUT_TENSOR_CORES = re.compile(r"\b(GTX 16\d\d|MX[45]50|T(400|500|550|600|1000|1200|2000))\b")


def generation_of(compute_capability: tuple[int, int], device_name: str = "") -> Generation:
    """Returns the generation of a GPU; `device_name` separates a GTX 16xx from the other Turing GPUs.

    A minor version not in the table is treated as the nearest lower one. A major version not in the table is
    named `sm_130` or similar: a newer one gets the features of the newest known one, an older one gets none.
    """
    generation = GENERATIONS.get(compute_capability) or _nearest(compute_capability)
    if compute_capability == (7, 5) and _TURING_WITHOUT_TENSOR_CORES.search(device_name):
        return replace(generation, tensor_cores=False)
    return generation


def _nearest(compute_capability: tuple[int, int]) -> Generation:
    major, minor = compute_capability
    relatives = [known for known in GENERATIONS if known[0] == major]
    if relatives:
        before = [known for known in relatives if known[1] < minor]
        return replace(GENERATIONS[max(before) if before else min(relatives)], fp16_rate=None)
    name = f"sm_{major}{minor}"
    newest = max(GENERATIONS)
    if compute_capability > newest:
        return replace(GENERATIONS[newest], name=name, fp16_rate=None)
    return Generation(name=name)
