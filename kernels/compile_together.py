"""Compilation of several kernels at the same time.

Of the 2 to 4 s that a Hopper kernel takes to compile, Python's own part is a fifth; the passes of MLIR and LLVM do not
hold the interpreter's lock, and ptxas is a process of its own. So threads are enough, and Triton compiles in threads
where ``AsyncCompileMode`` asks for it.
"""

from __future__ import annotations

import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton import AsyncCompileMode
from triton.compiler import CompiledKernel
from triton.runtime import _async_compile
from triton.runtime._async_compile import FutureKernel

THREADS = 16  # at most; a launch with its variants has up to 12 kernels

# Virtual ranks are threads that need the same kernels at once: the first compiles them, and the others find them in
# Triton's cache.
_one_caller = threading.Lock()


def compile_together(calls: Sequence[Callable[[], Any]]) -> list[CompiledKernel]:
    """Call every one, which is the ``warmup`` of a kernel, and return what they compile, in this order. No kernel is
    loaded.

    Raises:
        Exception: what the first one to fail raised; the others have ended, too.
    """
    with _one_caller:
        threads = min(len(calls), len(os.sched_getaffinity(0)), THREADS)
        if threads < 2 or _async_compile.active_mode.get() is not None:  # the caller has threads of its own
            return [_compiled(x) for x in [call() for call in calls]]
        # Triton 3.6 leaves the mode active if a compilation fails: it ends with the context. Its code generator changes
        # the filters of warnings for a moment, which threads would undo in another order than they did it.
        with warnings.catch_warnings():
            return contextvars.copy_context().run(_in_threads, calls, threads)


def _in_threads(calls: Sequence[Callable[[], Any]], threads: int) -> list[CompiledKernel]:
    with ThreadPoolExecutor(threads, "ringattn-compile") as pool, AsyncCompileMode(pool):
        found = [call() for call in calls]
    return [_compiled(x) for x in found]


def _compiled(x: CompiledKernel | FutureKernel) -> CompiledKernel:
    return x.result() if isinstance(x, FutureKernel) else x
