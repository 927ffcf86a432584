"""Compilation of several kernels at the same time.

Of the 2 to 4 s that a Hopper kernel takes to compile, Python's own part is a fifth; the passes of MLIR and LLVM do not
hold the interpreter's lock, and ptxas is a process of its own. So threads are enough.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.runtime import cache, driver

from . import prebuilt

# At most; each may need 0.2 GB, and all ranks of a host compile at once. Before Python 3.11.8, ast.parse raises
# SystemError now and then if several threads parse (python/cpython#106905).
THREADS = 8 if sys.version_info >= (3, 11, 8) else 1

# Virtual ranks are threads that need the same kernels at once: the first compiles them, and the others find them in
# Triton's cache.
_one_caller = threading.Lock()


def compile_together(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """Call every one, which is the ``warmup`` of a kernel for this device, in threads.

    Returns:
        What each one returned, or the exception that it raised, in the order of ``calls``.
    """
    # A code generator may change the filters of warnings for a moment, as Triton 3.6's does, which threads undo in
    # another order than they did it.
    runs = [_outcome(call) for call in calls]
    with _one_caller, warnings.catch_warnings():
        try:
            return _in_threads(runs, device)
        except RuntimeError:  # no thread can be started: Python is about to end, or there are too many
            return [run() for run in runs]


def _outcome(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls ``call`` and returns its result, or the exception that it raised."""

    def run() -> Any:
        try:
            return call()
        except Exception as error:
            return error

    return run


def _in_threads(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    # Threads, even for a single kernel: they are not in an AsyncCompileMode of the caller, which would return before
    # the kernel is compiled. A thread's current GPU is the first one until it is set.
    threads = min(len(calls), len(os.sched_getaffinity(0)), THREADS)
    prepare = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
    with ThreadPoolExecutor(threads, "ringattn-compile", prepare) as pool:
        try:
            if device.type == "cuda":
                # The first time Triton hashes its library, 400 MB, and makes its driver with a C compiler, and threads
                # that need both at once make several: both at the same time, and the driver here.
                if prebuilt.problem() is not None:
                    pool.submit(getattr(cache, "triton_key", lambda: None))
                _ = driver.active
            return [future.result() for future in [pool.submit(call) for call in calls]]
        except BaseException:  # KeyboardInterrupt: only what is being compiled is waited for
            pool.shutdown(wait=False, cancel_futures=True)
            raise
