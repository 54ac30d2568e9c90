"""Findings on matrix products and convolutions that run slower than the GPU could."""

from __future__ import annotations

from collections.abc import Iterator

from amptune.hardware.machine import Gpu
from amptune.measure.breakdown.module_times import LISTED, SHARE, Times, finding_about, where
from amptune.measure.results.step_profile import ALIGNED, ProductTime, StepProfile
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = ["product_findings"]

# Padding is easy, and saves a good third of its products' time: worth a finding from a smaller share of the step.
UNALIGNED_SHARE, UNALIGNED_GAIN = 0.05, 0.3
# Tensor cores are at least four times as fast.
PLAIN_GAIN = 0.75


def product_findings(profile: StepProfile, gpu: Gpu | None, policy: Policy) -> Iterator[Finding]:
    """Yields `unaligned-matmul` and `no-tensor-cores`; each `gain_ms` is a guess."""
    if gpu is None:
        return
    if gpu.tensor_cores:
        yield from _unaligned(profile)
    yield from _no_tensor_cores(profile, gpu, policy)


def _unaligned(profile: StepProfile) -> Iterator[Finding]:
    ms = sum(matmul.ms for matmul in profile.unaligned)
    if ms <= UNALIGNED_SHARE * profile.step_ms:
        return
    times = [(matmul.module, matmul.ms) for matmul in profile.unaligned]
    slowest = profile.unaligned[0]
    sizes = {"m": slowest.m, "n": slowest.n, "k": slowest.k}
    odd = [f"{name} = {size}" for name, size in sizes.items() if size % ALIGNED]
    message = (
        f"half-precision products with a dimension that is no multiple of 8 take {ms:.3g} ms of the step's "
        f"{profile.step_ms:.3g}, {where(times, profile)}; the slowest is an {slowest.op} of (m, k) × (k, n) with "
        f"{' and '.join(odd)}: pad that size to the next multiple of 64 (a vocabulary of 50257 to 50304, say)"
    )
    shapes = [{"module": u.module, "op": u.op, "m": u.m, "n": u.n, "k": u.k, "ms": u.ms} for u in profile.unaligned]
    figures = {"gain_ms": UNALIGNED_GAIN * ms, "unaligned_ms": ms, "matmuls": shapes[:LISTED]}
    yield finding_about("unaligned-matmul", message, profile, times, **figures)


def _no_tensor_cores(profile: StepProfile, gpu: Gpu, policy: Policy) -> Iterator[Finding]:
    plain = [product for product in profile.products if product.plain_ms]
    times: Times = [(product.module, product.plain_ms) for product in plain]
    ms = sum(time for _, time in times)
    if ms <= SHARE * profile.step_ms:
        return
    message = (
        f"matrix products and convolutions take {ms:.3g} ms of the step's {profile.step_ms:.3g} without tensor cores, "
        f"{where(times, profile)}: {_towards_tensor_cores(plain, gpu, policy)}"
    )
    can = gpu.tensor_cores and not _allowed(plain[0], gpu, policy)
    kernels = [*dict.fromkeys(product.slowest_plain for product in plain[:LISTED])]
    figures = {"gain_ms": PLAIN_GAIN * ms if can else 0.0, "plain_ms": ms, "kernels": kernels}
    yield finding_about("no-tensor-cores", message, profile, times, **figures)


def _towards_tensor_cores(plain: list[ProductTime], gpu: Gpu, policy: Policy) -> str:
    if not gpu.tensor_cores:
        has_none = f"this {gpu.name} has none"
        if gpu.fp16_rate is not None and gpu.fp16_rate < 1:
            return f"{has_none}, and FP16 runs at {gpu.fp16_rate:.2g} of the rate of FP32 on it; keep products in FP32"
        return f"{has_none}, so half precision saves memory and traffic, and little arithmetic"
    if _allowed(plain[0], gpu, policy):
        shapes = "few channels or many groups" if plain[0].kind == "convolution" else "very few rows, or odd sizes"
        unused = "" if policy.precision == "off" else "; half precision gains little there, so try fp32_modules"
        return f"the precision allows them, but the library chose no such kernel, as it does for {shapes}{unused}"
    if policy.precision != "off":
        return "products kept in FP32 use them with fp32_math: tf32" if gpu.tf32 else "they are kept in FP32"
    return f"FP32 does not use them as it is set; try {'fp32_math: tf32, or ' if gpu.tf32 else ''}autocast"


def _allowed(product: ProductTime, gpu: Gpu, policy: Policy) -> bool:
    """Returns True if the policy lets the product use tensor cores; stock PyTorch allows only convolutions in TF32."""
    if not policy.uses_fp32_math if product.in_half is None else product.in_half:
        return True
    return gpu.tf32 and (policy.fp32_math == "tf32" or (policy.fp32_math == "stock" and product.kind == "convolution"))
