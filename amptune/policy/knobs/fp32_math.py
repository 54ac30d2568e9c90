"""The precision of what runs in FP32: matrix products, convolutions and RNNs."""

from __future__ import annotations

from typing import Literal, get_args

from amptune.policy.knobs.knob import Knob, Model, Undo

__all__ = ["FP32_MATH", "Fp32Math"]

Fp32Math = Literal["stock", "ieee", "tf32"]


def _apply(math: Fp32Math, _: Model) -> Undo:
    from amptune.changes.flags import set_fp32_math

    return set_fp32_math(math)


FP32_MATH = Knob(
    name="fp32_math",
    stock="stock",
    values=get_args(Fp32Math),
    is_always_written=True,
    is_global=True,
    matters=lambda value, subject: value == "stock" or subject.castable,
    # Where products run in FP32: DeepLabV3+ took 39.5 GB with IEEE math where TF32 takes 6.6 (an H200).
    in_memory=lambda policy: "ieee" if policy.precision == "off" and policy.fp32_math == "ieee" else "stock",
    apply=_apply,
    words="{} for FP32",
    sentences={
        "stock": "fp32_math stock: PyTorch's default; on a GPU, IEEE matrix products and TF32 convolutions.",
        "ieee": "fp32_math ieee: FP32 operations keep all 24 bits of precision, convolutions too; the slowest.",
        "tf32": "fp32_math tf32: FP32 matrix products and convolutions use tensor cores, inputs rounded to 11 bits.",
    },
)
