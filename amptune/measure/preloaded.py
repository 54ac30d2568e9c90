"""What every worker imports, for the process that workers are forked from (`processes`); no other imports this module.

Seconds of each worker's start are saved: torch, and `torch._dynamo`, which the first optimizer imports.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal

__all__: list[str] = []

# Ctrl-C is the parent's, while this imports too.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# No import may open a CUDA context: a forked process could not use it. A worker's environment is its parent's own.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.suppress(Exception):
    # What goes wrong here goes wrong in the worker again, where there is somebody to tell.
    import torch
    import torch._dynamo  # noqa: F401

# What stays for good need not be looked through by each trial's collection of garbage, which takes 0.2 s else; nor is a
# forked process given copies of its pages for that.
gc.collect()
gc.freeze()
