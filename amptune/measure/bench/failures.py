"""Conversion of exceptions into typed failures. An exception never becomes a number."""

from __future__ import annotations

import traceback
from types import TracebackType

import torch

from amptune.errors import AmptuneError, PolicyApplyError, ScriptEndedError, first_line
from amptune.measure.results.outcome import Failure, FailureKind
from amptune.workload.user_errors import where_in_user_code

__all__ = ["NonFiniteError", "TooSlowError", "cuda_is_broken", "failure_of"]

# Out-of-memory messages besides torch.OutOfMemoryError: of the CUDA runtime, cuBLAS, cuDNN, the CPU allocator.
_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
)
_COMPILER = ("torch._dynamo", "torch._inductor")
_UPDATING = ("torch/amp/grad_scaler.py", "torch/nn/utils/clip_grad.py", "amptune/runtime/scaler.py")
# Memory is short if less than this share of the device's is free.
_SHORT = 0.1
_UNSUPPORTED = ("not implemented for", "is not supported", "not currently supported", "CUDNN_STATUS_NOT_SUPPORTED")


class NonFiniteError(ArithmeticError):
    """Error for a loss, gradient, weight or buffer that is not finite, or if the loss scaler skipped every step.

    `modules` are the paths of the modules whose gradients broke, if known.
    """

    def __init__(self, message: str, modules: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.modules = modules


class TooSlowError(Exception):
    """Error for a task that needs far more time than it has."""


def failure_of(error: BaseException) -> Failure:
    """Converts an exception into a failure, with the place in the user's code where it was raised."""
    if isinstance(error, AmptuneError) and error.__cause__ is not None:
        error = error.__cause__  # the user's own exception is clearer
    return Failure(
        kind=_kind_of(error),
        message=first_line(error),
        where=where_in_user_code(error.__traceback__),
        exception=type(error).__name__,
        in_update=_is_in_update(error.__traceback__),
    )


def cuda_is_broken() -> bool:
    """Returns True if a CUDA error has made this process unusable: such errors repeat at every later call."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has not typed it
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _kind_of(error: BaseException) -> FailureKind:
    text = str(error)
    if isinstance(error, NonFiniteError):
        return "nonfinite"
    if isinstance(error, TooSlowError):
        return "timeout"
    if isinstance(error, ScriptEndedError):  # its process is of no more use, and another one may go on
        return "killed"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _any_in(_OUT_OF_MEMORY, text):
        return "oom"
    if "CUDNN_STATUS_NOT_SUPPORTED" in text and _memory_is_short():
        return "oom"  # cuDNN's answer when no workspace fits
    if _is_of_the_compiler(error) or isinstance(error, NotImplementedError | PolicyApplyError):
        return "unsupported"
    if _any_in(_UNSUPPORTED, text):
        return "unsupported"
    if "CUDA error" in text or "CUBLAS_STATUS" in text or "CUDNN_STATUS" in text:
        return "crash"
    return "error"


def _is_of_the_compiler(error: BaseException) -> bool:
    """Returns True if torch.compile failed: no C++ compiler or Triton, or an operation that it cannot lower."""
    return type(error).__module__.partition(".")[0] == "triton" or type(error).__module__.startswith(_COMPILER)


def _is_in_update(trace: TracebackType | None) -> bool:
    """Returns True for an exception of the loss scaler, the optimizer or clipping, but not of a model they called."""
    for frame in reversed(traceback.extract_tb(trace)):
        file = frame.filename.replace("\\", "/")
        if file.endswith("torch/nn/modules/module.py"):
            return False
        if file.endswith(_UPDATING) or "torch/optim/" in file:
            return True
    return False


def _any_in(needles: tuple[str, ...], text: str) -> bool:
    return any(needle in text for needle in needles)


def _memory_is_short() -> bool:
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return False
    return free < _SHORT * total
