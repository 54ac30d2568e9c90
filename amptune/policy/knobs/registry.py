"""All knobs, in the order in which a policy file has them. `Policy` has a field for each."""

from __future__ import annotations

from amptune.policy.knobs.autocast import AUTOCAST
from amptune.policy.knobs.batch import ACCUMULATE, BATCH_SIZE
from amptune.policy.knobs.compile_mode import COMPILE
from amptune.policy.knobs.cuda_graphs import CUDA_GRAPHS
from amptune.policy.knobs.cudnn_benchmark import CUDNN_BENCHMARK
from amptune.policy.knobs.fp32_math import FP32_MATH
from amptune.policy.knobs.fused_optimizer import FUSED_OPTIMIZER
from amptune.policy.knobs.half_weights import KEEP_BATCHNORM_FP32, MASTER_WEIGHTS, WEIGHTS
from amptune.policy.knobs.knob import Knob
from amptune.policy.knobs.loss_scale import LOSS_SCALE
from amptune.policy.knobs.memory_format import MEMORY_FORMAT
from amptune.policy.knobs.precision_rules import FP32_MODULES, HALF_MODULES

__all__ = ["KNOBS"]

KNOBS: tuple[Knob, ...] = (
    AUTOCAST,
    WEIGHTS,
    MASTER_WEIGHTS,
    KEEP_BATCHNORM_FP32,
    FP32_MATH,
    FP32_MODULES,
    HALF_MODULES,
    MEMORY_FORMAT,
    CUDNN_BENCHMARK,
    BATCH_SIZE,
    ACCUMULATE,
    COMPILE,
    CUDA_GRAPHS,
    FUSED_OPTIMIZER,
    LOSS_SCALE,
)
