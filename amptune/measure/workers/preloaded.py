"""Imports needed by every worker. Only the fork server, from which workers are forked, imports this module.

Each worker then starts seconds faster: torch is loaded, `torch._dynamo`, which the first optimizer imports, and the
installed libraries that the workload's file imports. The file itself is run in workers alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import sys
import threading

from amptune.measure.workers.processes import LIBRARIES
from amptune.workload.user_errors import is_the_users

__all__: list[str] = []


def _import(name: str) -> None:
    """Imports an installed library; lazy ones import a part of theirs when it is looked up."""
    module, _, attribute = name.partition(":")
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is not None and spec.origin is not None and not is_the_users(spec.origin):
        getattr(importlib.import_module(module), attribute or "__name__", None)


def _has_called_cuda() -> bool:
    """Returns True if anything called CUDA's driver, which torch does not know if it was another library."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # it is not even loaded
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)  # else "not initialized"


# Only the parent handles Ctrl-C and the end of the terminal, also during these imports.
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
# No import may open a CUDA context: a forked process could not use it. A worker later takes its parent's environment.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

with (
    open(os.devnull, "w") as nowhere,
    contextlib.redirect_stderr(nowhere),
    contextlib.redirect_stdout(nowhere),
    contextlib.suppress(Exception),
):
    # An error here is ignored: it occurs again in the worker, which can report it.
    import torch._dynamo  # noqa: F401

    threads, libraries = threading.active_count(), os.environ.pop(LIBRARIES, "").split()
    for library in libraries:
        with contextlib.suppress(BaseException):
            _import(library)

    if libraries and (threading.active_count() > threads or _has_called_cuda()):
        # Neither a library's threads nor CUDA's driver outlive a fork: once more, without the libraries.
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606  # itself

# Frozen objects are skipped by each trial's garbage collection, which takes 0.2 s otherwise. Forked processes then need
# no copies of their memory pages.
gc.collect()
gc.freeze()
