"""Imports needed by every worker. Only the fork server, from which workers are forked, imports this module.

Each worker then starts seconds faster: torch is loaded, and `torch._dynamo`, which the first optimizer imports.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal

__all__: list[str] = []

# Only the parent handles Ctrl-C, also during these imports.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# No import may open a CUDA context: a forked process could not use it. A worker later takes its parent's environment.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.suppress(Exception):
    # An error here is ignored: it occurs again in the worker, which can report it.
    import torch
    import torch._dynamo  # noqa: F401

# Frozen objects are skipped by each trial's garbage collection, which takes 0.2 s otherwise. Forked processes then need
# no copies of their memory pages.
gc.collect()
gc.freeze()
