"""Whether cuDNN times its algorithms when a shape first comes."""

from __future__ import annotations

from amptune.policy.knobs.knob import TRUTH, Knob, Model, Undo

__all__ = ["CUDNN_BENCHMARK"]


def _apply(enabled: bool, _: Model) -> Undo:
    from torch.backends import cudnn

    from amptune.changes.flags import hold

    return hold("cudnn_benchmark", enabled, lambda: cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value))


CUDNN_BENCHMARK = Knob(
    name="cudnn_benchmark",
    stock=False,
    values=TRUTH,
    is_always_written=True,
    # cuDNN may choose other algorithms in each run, so that judging those of one says nothing of the next.
    numerics="none",
    # DeepLabV3+ took 72.6 GB with it in TF32 (an H200).
    # PyTorch caches cuDNN's execution plans by shape, dtype and layout but not by `cudnn.benchmark`
    # (aten/src/ATen/native/cudnn/Conv_v8.cpp), and torch.compile ignores it.
    graph=False,
    process=True,
    is_global=True,
    matters=lambda value, subject: bool(subject.convolution_dims) or not value,
    apply=_apply,
    risks={True: "cuDNN may choose other algorithms in each run: sums then differ in their last bits, and memory too."},
    sentences={
        True: "cudnn_benchmark true: cuDNN times its algorithms for every new shape; keep shapes constant.",
    },
)
