"""Weights and buffers held in fp16, which replaces autocast, and what keeps them sound."""

from __future__ import annotations

from typing import Literal, get_args

from amptune.policy.knobs.knob import TRUTH, Knob

__all__ = ["KEEP_BATCHNORM_FP32", "MASTER_WEIGHTS", "WEIGHTS", "Weights"]

Weights = Literal["fp32", "half"]


WEIGHTS = Knob(
    name="weights",
    stock="fp32",
    values=get_args(Weights),
    conflict=lambda policy: (
        policy.autocast != "off"
        and f"weights: half weights compute in half without autocast, and autocast is {policy.autocast}"
    ),
    matters=lambda value, subject: value == "fp32" or (subject.castable and not subject.in_place),
    precision="whole",
    is_optional=True,  # few machines gain by it
    words="{} weights",
    sentences={
        "half": "weights half: weights are held in float16 and everything computes in it, without autocast's casts; "
        "it has 11 bits of precision and a small range."
    },
)
MASTER_WEIGHTS = Knob(
    name="master_weights",
    stock=False,
    values=TRUTH,
    conflict=lambda policy: (
        policy.weights != "half"
        and f"master_weights: only half weights have FP32 masters, and weights is {policy.weights}"
    ),
    precision="whole",
    is_own_choice=False,  # the numerics may need it, and a short measurement cannot tell
    is_optional=True,
    sentences={
        False: "master_weights false: weights are updated in float16, which loses updates below a 2000th of a weight.",
        True: "master_weights true: the optimizer updates FP32 copies of the weights, so that small updates are not "
        "lost; the loss is scaled, and a step whose gradients overflow is skipped.",
    },
)
KEEP_BATCHNORM_FP32 = Knob(
    name="keep_batchnorm_fp32",
    stock=False,
    values=TRUTH,
    conflict=lambda policy: (
        policy.weights != "half"
        and f"keep_batchnorm_fp32: BatchNorm is in FP32 already where weights is {policy.weights}"
    ),
    memory=False,
    precision="whole",
    is_own_choice=False,
    is_optional=True,
    words="BatchNorm in FP32",
    sentences={True: "keep_batchnorm_fp32 true: BatchNorm's weights and statistics stay in FP32."},
)
